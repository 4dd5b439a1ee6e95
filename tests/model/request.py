"""The real flow of a request as a function on numbered snapshots: `step(number, gate, event)` gives what it asks for.

The body is real, so salts, handoffs and continued streams are made and read by the router's own code. Names of replicas
are blanked before a flow sees them: it only passes them on, and requests that differ by them alone are one. Time stands
still; `AGED` makes the handoff in hand older than its lease.
"""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from connectors.types import Role
from router.core import commands
from router.core.asks import Grant, Refusal
from router.core.epochs import Salter
from router.core.events import (
    Arrived,
    ClientGone,
    Event,
    Interrupted,
    LegAnswered,
    LegFailed,
    LegStreaming,
    StreamEnded,
    Thawed,
    TimeReached,
)
from router.core.flow import Flow
from router.core.gate import Gate, GateState
from router.core.retry import RetryBudget
from router.core.rules import FlowRules, FlowTools
from tests.unit.router.model_engine import ModelEngine

Happened = tuple[Any, ...]
"""What a flow is told: a word, and what belongs to it."""
ARRIVED: Happened = ("arrived",)
PREFILLED: Happened = ("prefilled",)
REFUSED: Happened = ("refused",)
FAILED: Happened = ("failed",)
STREAMING: Happened = ("streaming",)
ENDED: Happened = ("ended",)
THAWED: Happened = ("thawed",)
GONE: Happened = ("gone",)
AGED: Happened = ("aged",)
CURRENT, STALE = 0, 1
"""Tickets of a grant that answers the request's last question, or an older one."""

_LIFETIME_S = 10.0
_SALTER = Salter(b"secret")
_EPOCH_OF = {_SALTER.salt(epoch, None): epoch for epoch in range(50)}
_BODY = b'{"prompt": "say: ", "stream": true, "max_tokens": 2, "return_headrace": true}'
_HANDOFF = b'{"kv_transfer_params": {"do_remote_prefill": true}}'


class Asks(NamedTuple):
    """For a replica: `epoch` is the handoff's, None for a first leg."""

    epoch: int | None


class Sends(NamedTuple):
    """A leg. `salt` is the epoch that its salt is for."""

    role: Role
    epoch: int
    salt: int
    has_handoff: bool


class Closes(NamedTuple):
    """The leg's connection."""


class Ends(NamedTuple):
    """A leg, for the dispatcher."""

    ticket: int


class Rests(NamedTuple):
    """Before another attempt."""


class Leaves(NamedTuple):
    """The request is over; how its reply is labelled."""

    versions: tuple[str, ...]
    is_single: bool


Does = Asks | Sends | Closes | Ends | Rests | Leaves


class Step(NamedTuple):
    does: tuple[Does, ...]
    number: int


class _Request:
    def __init__(self, tools: FlowTools) -> None:
        self.flow = Flow(tools)
        self.body = b""
        """Of the leg that is under way."""


class Requests:
    """Every snapshot met so far, and what came of each event."""

    def __init__(self, *, lifetime_s: float = _LIFETIME_S) -> None:
        rules = FlowRules(
            retries=1,
            retry_backoff_s=0.0,
            request_timeout_s=1e9,
            leg_timeout_s=None,
            handoff_lifetime_s=lifetime_s,
            session_fields=(),
            readmit_streams=True,
            max_samples=1,
        )
        budget = RetryBudget.full(per_request=0.0, most=10**9)
        self._gate = Gate()
        self._tools = FlowTools(gate=self._gate, salter=_SALTER, budget=budget, rules=rules)
        self._shared: dict[int, Any] = {id(each): each for each in (self._tools, self._gate, _SALTER, budget, rules)}
        self._numbers: dict[Any, int] = {}
        self._requests: list[_Request] = []
        self._steps: dict[tuple[int, GateState, bool, Happened], Step] = {}
        self.kept: list[bool] = []
        """Of each snapshot: its reply will say that it lived through an update."""
        self.between_legs: list[bool] = []
        self.parked: list[bool] = []
        self.new = self._number(_Request(self._tools))

    def step(self, number: int, gate: GateState, happened: Happened, *, keeps: bool) -> Step:
        found = self._steps.get((number, gate, keeps, happened))
        if found is None:
            self._gate.set(gate)
            self._gate.keeps = keeps
            found = self._steps[number, gate, keeps, happened] = self._step(number, happened)
        return found

    def state(self, number: int) -> str:
        return self._requests[number].flow.state

    def _step(self, number: int, happened: Happened) -> Step:
        request: _Request = copy.deepcopy(self._requests[number], dict(self._shared))
        flow = request.flow
        if happened == AGED:
            if (handoff := flow.legs._handoff) is not None:
                flow.legs._handoff = msgspec.structs.replace(handoff, send_by=handoff.send_by - 2 * _LIFETIME_S)
            return Step((), self._number(request))
        # A parked request, whose client has left, has no relay.
        if happened == ENDED and (relay := flow._stream.relay) is not None:
            relay.feed(b"".join(_stream(request.body)[1:]))
        done: list[Does] = []
        queue = flow.step(_event(happened, request), 0.0)
        while queue:
            command = queue.pop(0)
            if isinstance(command, commands.Pause):
                queue += flow.step(TimeReached(), 0.0)
            elif (does := self._does(command, request)) is not None:
                done.append(does)
        flow._asks = 1
        flow._story.clear()
        if "legs" in vars(flow):
            flow.legs._attempt, flow.legs._number = 1, 1
            if flow.legs.live is not None:
                flow.legs.live.number = 1
        return Step(tuple(done), self._number(request))

    def _does(self, command: commands.Command, request: _Request) -> Does | None:
        match command:
            case commands.AskReplica(ask=ask):
                return Asks(ask.handoff_epoch)
            case commands.SendLeg(role=role, epoch=epoch, body=body, send_by=send_by):
                request.body = body
                return Sends(role, epoch, _EPOCH_OF[json.loads(body)["cache_salt"]], send_by is not None)
            case commands.CancelLeg():
                return Closes()
            case commands.EndLeg(end=end):
                return Ends(end.ticket)
            case commands.Leave():
                label = json.loads(request.flow.legs.making.label())
                return Leaves(tuple(label["weight_versions"]), label["single_version"])
        return None

    def _number(self, request: _Request) -> int:
        flow = request.flow
        number = self._numbers.setdefault(_key(request, self._shared), len(self._requests))
        if number == len(self._requests):
            self._requests.append(request)
            self.kept.append("legs" in vars(flow) and flow.legs.making.kept)
            self.between_legs.append(flow.state == "asking_second")
            self.parked.append(flow.state == "parked")
        return number


def _event(happened: Happened, request: _Request) -> Event:
    match happened:
        case ("arrived",):
            return Arrived(
                number=0,
                route="completions",
                path="/v1/completions",
                body=_BODY,
                session_header=None,
                min_version=None,
                request_key="key",
            )
        case ("granted", ticket, role, epoch, version):
            return Grant(
                ticket=ticket,
                serial=request.flow._asks - ticket,
                role=role,
                replica=role,
                url="http://engine",
                instance="",
                epoch=epoch,
                version=version,
                reason="unpinned",
            )
        case ("no grant", kind):
            return Refusal(serial=request.flow._asks, kind=kind, message="")
        case ("prefilled",):
            return LegAnswered(leg=1, status=200, body=_HANDOFF, content_type="application/json")
        case ("refused",):
            return LegAnswered(leg=1, status=503, body=b"{}", content_type="application/json")
        case ("failed",):
            return LegFailed(leg=1, failure="broken", detail="")
        case ("streaming",):
            return LegStreaming(leg=1, head=_stream(request.body)[0], content_type="text/event-stream")
        case ("ended",):
            return StreamEnded(leg=1)
        case ("thawed",):
            return Thawed()
        case ("gone",):
            return ClientGone()
        case ("interrupted", how):
            return Interrupted(how)
    raise AssertionError(happened)


def _stream(body: bytes) -> list[bytes]:
    return ModelEngine("completions", [b"a", b"b"]).stream(json.loads(body))


def _key(value: Any, shared: Mapping[int, Any]) -> Any:
    """All that a request is made of, as hashable data."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if id(value) in shared or isinstance(value, type):
        return ""
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, types.MethodType):
        return value.__name__
    if isinstance(value, Mapping):
        return tuple((key, _key(each, shared)) for key, each in sorted(value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, list | tuple | bytearray) or type(value).__name__ == "array":
        return tuple(_key(each, shared) for each in value)
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names += getattr(value, "__struct_fields__", ())
    names += [name for name in getattr(value, "__dict__", ()) if name != "_story"]
    return (type(value).__name__, *((name, _key(getattr(value, name, None), shared)) for name in sorted(set(names))))
