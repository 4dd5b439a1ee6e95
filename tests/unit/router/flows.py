"""One request's flow over a dispatcher, driven without any IO."""

from __future__ import annotations

import json
from typing import Any

from router.core.commands import Answer, AskReplica, CountChoice, EndLeg, EndRelay, Leave, Pause, SendLeg
from router.core.epochs import Salter
from router.core.events import (
    Arrived,
    ClientGone,
    HandoffExpired,
    Interrupted,
    LegAnswered,
    LegFailed,
    LegStreaming,
    StreamEnded,
    Thawed,
    TimeReached,
)
from router.core.flow import Flow
from router.core.retry import RetryBudget
from router.core.rules import FlowRules, FlowTools
from tests.unit.router.dispatchers import Room
from tests.unit.router.fleets import is_idle

HANDOFF = b'{"remote_block_ids":[[1]]}'
JSON = "application/json"
SALTER = Salter(b"secret")


def metrics(*, queue_ms: float, first_token_ms: float) -> bytes:
    return json.dumps({"queue_time_ms": queue_ms, "time_to_first_token_ms": first_token_ms}).encode()


class Driver:
    """A flow, the room that it asks in, and the leg that it sent last."""

    def __init__(
        self, *, retries: int = 1, leg_timeout_s: float | None = None, budget: int = 50, room: Room | None = None,
        number: int = 0, **settings: Any,
    ) -> None:  # fmt: skip
        self.room = room if room is not None else Room(**settings)
        self.gate, self.fleet = self.room.gate, self.room.fleet
        rules = FlowRules(
            retries=retries,
            retry_backoff_s=0.5,
            request_timeout_s=240.0,
            leg_timeout_s=leg_timeout_s,
            handoff_lifetime_s=28.0,
            session_fields=("session_id",),
            readmit_streams=False,
            max_samples=16,
        )
        self.budget = RetryBudget.full(per_request=0.2, most=budget)
        self.flow = Flow(FlowTools(gate=self.gate, salter=SALTER, budget=self.budget, rules=rules))
        self.number = number
        self.leg: SendLeg | None = None

    def step(self, event: Any, now: float = 0.0) -> list[Any]:
        """What the flow says, apart from what it says to the dispatcher."""
        said, events = [], [event]
        while events:
            for command in self.flow.step(events.pop(0), now):
                if isinstance(command, AskReplica):
                    answer = self.room.dispatcher.ask(command.ask, now)
                    if answer is not None:
                        events.append(answer)
                elif isinstance(command, EndLeg):
                    self.room.dispatcher.end_leg(command.end, now)
                elif isinstance(command, Leave):
                    self.room.dispatcher.leave(command.request, now)
                elif not isinstance(command, CountChoice):
                    self.leg = command if isinstance(command, SendLeg) else self.leg
                    said.append(command)
        return said

    def sent(self) -> SendLeg:
        assert self.leg is not None, "no leg was sent"
        return self.leg

    def arrive(self, body: bytes = b'{"prompt": "hello"}', now: float = 0.0, **more: Any) -> list[Any]:
        facts: dict[str, Any] = {
            "number": self.number, "route": "completions", "path": "/v1/completions", "request_key": "key",
            "session_header": None, "min_version": None,
        }  # fmt: skip
        return self.step(Arrived(body=body, **(facts | more)), now)

    def deliver(self, now: float = 0.0) -> list[Any]:
        """The answers for which it waited in line."""
        outbox, self.room.dispatcher.outbox = self.room.dispatcher.outbox, []
        return [command for _, answer in outbox for command in self.step(answer, now)]

    def open(self, now: float = 0.0) -> list[Any]:
        self.gate.set("open")
        self.room.look(now)
        return self.deliver(now)

    # -- what engines do -----------------------------------------------------------------------------------

    def answer(self, body: bytes = b"{}", status: int = 200, now: float = 0.0, kind: str = JSON) -> list[Any]:
        return self.step(LegAnswered(leg=self.sent().leg, status=status, body=body, content_type=kind), now)

    def hand_over(self, now: float = 0.0, timing: bytes = b"null") -> list[Any]:
        return self.answer(b'{"metrics": ' + timing + b', "kv_transfer_params": ' + HANDOFF + b"}", now=now)

    def fail(self, failure: Any = "broken", now: float = 0.0) -> list[Any]:
        return self.step(LegFailed(leg=self.sent().leg, failure=failure, detail="gone"), now)

    def stream(self, head: bytes = b"data: 1\n", now: float = 0.0) -> list[Any]:
        return self.step(LegStreaming(leg=self.sent().leg, head=head, content_type="text/event-stream"), now)

    def end_stream(self, now: float = 0.0) -> list[Any]:
        return self.step(StreamEnded(leg=self.sent().leg), now)

    def expire(self, now: float = 0.0) -> list[Any]:
        return self.step(HandoffExpired(leg=self.sent().leg), now)

    # -- what others do ------------------------------------------------------------------------------------

    def time(self, now: float) -> list[Any]:
        return self.step(TimeReached(), now)

    def rest(self, commands: list[Any]) -> list[Any]:
        """Until the pause is over with which these commands end."""
        assert isinstance(commands[-1], Pause), commands
        return self.time(commands[-1].until)

    def leave(self, now: float = 0.0) -> list[Any]:
        return self.step(ClientGone(), now)

    def thaw(self, now: float = 0.0) -> list[Any]:
        return self.step(Thawed(), now)

    def interrupt(self, how: Any, now: float = 0.0) -> list[Any]:
        return self.step(Interrupted(how), now)

    def until(self, state: str, now: float = 0.0) -> None:
        """Bring a fresh flow into a state."""
        if state in ("asking", "parked"):
            self.gate.set("holding" if state == "asking" else "open")
        self.arrive(now=now)
        if state == "resting":
            self.fail(now=now)
        if state in ("asking_second", "decode", "relaying"):
            if state == "asking_second":
                self.gate.set("frozen")
            self.hand_over(now=now)
        if state == "relaying":
            self.stream(now=now)
        if state == "parked":
            self.gate.set("frozen")
            self.leave(now=now)
        if state == "done":
            self.answer(status=400, now=now)
        assert self.flow.state == state

    @property
    def idle(self) -> bool:
        """Nothing of it is left anywhere."""
        dispatcher = self.room.dispatcher
        return is_idle(self.fleet) and dispatcher.admitted == dispatcher.waiting == 0 and not dispatcher.outbox


def pair(**settings: Any) -> Driver:
    return Driver(**({"prefill": 2, "decode": 2} | settings))


def kinds(commands: list[Any]) -> list[type]:
    return [type(each) for each in commands]


def status_of(commands: list[Any]) -> int:
    assert isinstance(commands[-1], Answer), commands
    return commands[-1].reply.status


def error_of(commands: list[Any]) -> Any:
    """The error with which a reply or a relayed stream ends."""
    last = commands[-1]
    assert isinstance(last, Answer | EndRelay), commands
    raw = last.reply.body if isinstance(last, Answer) else last.last.strip().removeprefix(b"data: ")
    return json.loads(raw)["error"]


def fields_of(leg: SendLeg) -> Any:
    """A leg's body without its salt."""
    fields = json.loads(leg.body)
    assert fields.pop("cache_salt") == SALTER.salt(leg.epoch, None)
    return fields
