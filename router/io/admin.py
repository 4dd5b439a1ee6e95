"""The internal port: the control plane reads the router's state and moves its gate, its epochs and its replicas.

Every route asks for the bearer token. `main.py` runs the app on a port of its own, so that nothing here can be reached
through the public one. Commands carry (update, attempt, step); one that is older than the newest taken gets 409. Not a
hot path: aiohttp.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from router.core.events import HowInterrupted
from router.core.finished import AuditOutcome, FinishedRequest
from router.core.gate import GateState, Order
from router.core.replies import Reply, error_reply, json_reply
from router.io.desk import Desk
from router.io.metrics import Metrics
from router.io.poller import Poller
from router.io.public import not_found
from router.io.serving import RunningLeg, Told
from router.settings import EngineRole, check_engine_url

_log = logging.getLogger(__name__)


_LOOK_EVERY_S = 0.02


class Floor(Protocol):
    """Where requests are served: this process, or all workers together."""

    async def gate_moved(self, state: GateState) -> None: ...

    async def settle(self, timeout_s: float) -> list[str]: ...

    async def running(self) -> list[RunningLeg]: ...

    async def interrupt(self, how: HowInterrupted, request_id: str | None = None) -> Told: ...

    async def ended(self, legs: list[RunningLeg], timeout_s: float) -> list[str]: ...

    async def idle(self, url: str, timeout_s: float) -> list[str]: ...

    async def finished(self) -> list[FinishedRequest]: ...


_Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,128}\Z")]
_Instance = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{0,64}\Z")]
"""Both stand in headers; an instance as the engines' fence spells it."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""More could not be told to a worker."""


class _Command(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    update: _Number = 0
    attempt: _Number = 0
    step: _Number = 0

    @property
    def order(self) -> Order:
        return (self.update, self.attempt, self.step)


class _SetGate(_Command, kw_only=True):
    gate: GateState
    timeout_s: float = 10.0
    """How long engines may take to confirm what was sent to them."""


class _ConfirmedReplica(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    instance: _Instance = ""


class _CommitEpoch(_Command, kw_only=True):
    epoch: _Number
    version: Annotated[str, msgspec.Meta(min_length=1)]
    committed: _Number | None = None
    """Epochs between this one and `epoch` were given up, and so were their versions; left out: none was."""
    replicas: list[_ConfirmedReplica] | None = None
    """Who holds these weights, confirmed; left out: every replica of the router."""


class _AddReplica(_Command, kw_only=True):
    name: _Name
    role: EngineRole
    url: str
    instance: _Instance = ""
    epoch: _Number | None = None


class _Drain(_Command, kw_only=True):
    draining: bool = True
    timeout_s: float = 0.0
    """Wait so long for its legs to end; 0: don't wait."""


class _InFlight(_Command, kw_only=True):
    mode: Literal["wait", "abort", "readmit", "keep"]
    timeout_s: float = 60.0


class _Audited(msgspec.Struct, forbid_unknown_fields=True):
    outcomes: dict[AuditOutcome, _Number]
    """Requests by outcome."""


_EPOCHS_SHOWN = 256
_Body = TypeVar("_Body", bound=_Command)


class _Refused(Exception):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


@dataclass(frozen=True, kw_only=True)
class AdminTools:
    """What the handlers work with, built by `main.py`."""

    job: str
    desk: Desk
    poller: Poller
    floor: Floor
    counted: Metrics
    """Of this process."""


class AdminRoutes:
    """One handler per route."""

    def __init__(self, tools: AdminTools) -> None:
        self._tools = tools
        self._dispatcher = tools.desk.dispatcher
        self._fleet = tools.desk.dispatcher.fleet
        self._moving = asyncio.Lock()
        """Held while the gate or what is in flight moves: a newer command waits for the end of an older one."""

    async def state(self, _request: web.Request) -> web.StreamResponse:
        dispatcher = self._dispatcher
        return _respond(
            json_reply(
                {
                    "job": self._tools.job,
                    "gate": dispatcher.gate.state,
                    "order": dispatcher.gate.order,
                    "epochs": {
                        str(number): version for number, version in dispatcher.epochs.newest(_EPOCHS_SHOWN).items()
                    },
                    "sessions": len(self._fleet.sessions),
                    "waiting": dispatcher.waiting,
                    "admitted": dispatcher.admitted,
                    "replicas": self._fleet.views(),
                }
            )
        )

    async def finished(self, _request: web.Request) -> web.StreamResponse:
        """The requests that were kept for an audit, those of one worker in the order in which they ended."""
        return _respond(json_reply({"requests": await self._tools.floor.finished()}))

    async def audited(self, request: web.Request) -> web.StreamResponse:
        """Count what an audit has found."""
        try:
            told: _Audited = msgspec.json.decode(await request.read(), type=_Audited)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _respond(error_reply(400, f"the body does not fit {request.path}: {error}", "outcomes"))
        for outcome, requests in told.outcomes.items():
            self._tools.counted.audited(outcome, requests)
        return _respond(json_reply({"outcomes": told.outcomes}))

    async def set_gate(self, request: web.Request) -> web.StreamResponse:
        """Answers when the new state holds: with a closed gate, when engines have taken all that was sent to them."""
        async with self._moving:
            asked = await self._read(request, _SetGate, "gate")
            self._dispatcher.gate.take(asked.order)
            floor = self._tools.floor
            if asked.gate == "open":
                # Everyone knows that it is open before the first is let through; that it is closed, after the last was.
                try:
                    await floor.gate_moved(asked.gate)
                finally:
                    # Whoever asked may have left by now; those who know close legs already.
                    self._tools.desk.set_gate(asked.gate)
            else:
                self._tools.desk.set_gate(asked.gate)
                await floor.gate_moved(asked.gate)
                unsettled = await floor.settle(asked.timeout_s)
                if unsettled:
                    message = f"after {asked.timeout_s:g} s no engine has confirmed {', '.join(unsettled[:10])}"
                    return _respond(error_reply(409, f"the gate is {asked.gate}, but {message}", "timeout_s"))
            running = len(await floor.running())
        return _respond(json_reply({"gate": asked.gate, "running": running, "waiting": self._dispatcher.waiting}))

    async def commit_epoch(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, _CommitEpoch, "epoch")
        known = self._dispatcher.epochs.version_of(asked.epoch)
        if known and known != asked.version:
            message = f"epoch {asked.epoch} is version {known!r}; an epoch number is never used again"
            return _respond(error_reply(409, message, "epoch"))
        confirmed = asked.replicas
        if confirmed is None:
            confirmed = [_ConfirmedReplica(name=name) for name in self._fleet.members]
        for each in confirmed:
            member = self._fleet.members.get(each.name)
            if member is None:
                return _respond(error_reply(404, f"no replica {each.name!r}", "replicas"))
            if each.instance and member.instance and each.instance != member.instance:
                message = f"{each.name} is instance {member.instance!r} here, not {each.instance!r}"
                return _respond(error_reply(409, message, "replicas"))
            if member.epoch is not None and member.epoch > asked.epoch:
                message = f"{each.name} is in epoch {member.epoch} already; an older one never comes back"
                return _respond(error_reply(409, message, "epoch"))
        self._dispatcher.gate.take(asked.order)
        self._dispatcher.epochs.commit(asked.epoch, asked.version, committed=asked.committed)
        for each in confirmed:
            self._fleet.members[each.name].instance = each.instance or self._fleet.members[each.name].instance
            self._fleet.confirm(each.name, asked.epoch)
        self._tools.desk.look_again()
        return _respond(json_reply({"epoch": asked.epoch, "replicas": [each.name for each in confirmed]}))

    async def add_replica(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, _AddReplica, "name")
        try:
            check_engine_url(asked.url)
        except ValueError as error:
            return _respond(error_reply(400, f"url {error}", "url"))
        if asked.epoch is not None and not self._dispatcher.epochs.version_of(asked.epoch):
            message = f"epoch {asked.epoch} is unknown; tell its version by POST /epochs first"
            return _respond(error_reply(409, message, "epoch"))
        self._dispatcher.gate.take(asked.order)
        self._fleet.add(name=asked.name, role=asked.role, url=asked.url, instance=asked.instance)
        if asked.epoch is not None:
            self._fleet.confirm(asked.name, asked.epoch)
        self._changed()
        return _respond(json_reply({"name": asked.name, "epoch": asked.epoch}))

    async def drain_replica(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, _Drain, "draining")
        name = self._known(request)
        self._dispatcher.gate.take(asked.order)
        self._fleet.drain(name, asked.draining)
        self._changed()
        legs = await self._drained(name, asked.timeout_s if asked.draining else 0.0)
        return _respond(json_reply({"name": name, "draining": asked.draining, "legs_in_flight": legs}))

    async def remove_replica(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, _Command, "name")
        name = self._known(request)
        self._dispatcher.gate.take(asked.order)
        self._fleet.remove(name)
        self._changed()
        return _respond(json_reply({"name": name, "removed": True}))

    async def in_flight(self, request: web.Request) -> web.StreamResponse:
        """What becomes of the requests that engines are working on, while the gate is closed."""
        async with self._moving:
            asked = await self._read(request, _InFlight, "mode")
            state = self._dispatcher.gate.state
            if state != "holding":
                message = f"running requests are dealt with while the gate is holding; it is {state}"
                return _respond(error_reply(409, message, "mode"))
            self._dispatcher.gate.take(asked.order)
            deadline = time.monotonic() + asked.timeout_s
            if asked.mode == "wait":
                count, left = await self._run_out(asked.timeout_s)
            else:
                told = await self._tools.floor.interrupt(asked.mode)
                kept = asked.mode == "keep"
                count = len(told.legs)
                left = [] if kept else await self._tools.floor.ended(told.legs, asked.timeout_s)
            if not left and asked.mode != "keep":
                left = await self._unended(deadline)
            if left:
                message = f"after {asked.timeout_s:g} s these still run: {', '.join(left[:10])}"
                return _respond(error_reply(409, message, "timeout_s"))
        return _respond(json_reply({"mode": asked.mode, "requests": count}))

    async def _unended(self, deadline: float) -> list[str]:
        """Wait until no engine has anything left, nor of clients that left just before the hold: engines pause next."""
        left_s = deadline - time.monotonic()
        urls = [member.url for member in self._fleet.members.values()]
        found = await asyncio.gather(*(self._tools.floor.idle(url, left_s) for url in urls))
        return [each for listed in found for each in listed]

    async def _run_out(self, timeout_s: float) -> tuple[int, list[str]]:
        """Wait until nothing runs and nobody is between two legs; how many legs were waited for, and those left."""
        deadline, count = time.monotonic() + timeout_s, 0
        while True:
            running = await self._tools.floor.running()
            count += len(running)
            left = await self._tools.floor.ended(running, deadline - time.monotonic())
            if left or not (running or self._dispatcher.between_legs):
                return count, left
            if time.monotonic() >= deadline:
                return count, [f"{self._dispatcher.between_legs} requests between their legs"]
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _read(self, request: web.Request, kind: type[_Body], param: str) -> _Body:
        """A command that is well-formed and not overtaken. Whoever finds that it can be carried out takes its order,
        before the next await."""
        try:
            asked: _Body = msgspec.json.decode(await request.read() or b"{}", type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _Refused(error_reply(400, f"the body does not fit {request.path}: {error}", param)) from error
        gate, order = self._dispatcher.gate, asked.order
        if not gate.accepts(order):
            message = f"(update, attempt, step) {order} is older than {gate.order}, which was taken before"
            raise _Refused(error_reply(409, message, "update"))
        return asked

    async def _drained(self, name: str, timeout_s: float) -> int:
        """Wait until a replica has no leg, at its engine neither: a leg that was closed may still be under way there as
        an abort. How many are left."""
        deadline = time.monotonic() + timeout_s
        while True:
            member = self._fleet.members.get(name)
            if member is None:
                return 0
            left_s = deadline - time.monotonic()
            if not member.legs and left_s > 0:
                return len(await self._tools.floor.idle(member.url, left_s))
            if left_s <= 0:
                return member.legs
            await asyncio.sleep(_LOOK_EVERY_S)

    def _known(self, request: web.Request) -> str:
        name = request.match_info["name"]
        if name not in self._fleet.members:
            raise _Refused(error_reply(404, f"no replica {name!r}", "name"))
        return name

    def _changed(self) -> None:
        self._tools.poller.follow_members()
        self._tools.desk.look_again()


def admin_app(tools: AdminTools, token: str) -> web.Application:
    """The app of the internal port."""
    routes = AdminRoutes(tools)
    app = web.Application(middlewares=[_json_errors, _authorize(token)])
    app.router.add_get("/state", routes.state)
    app.router.add_get("/finished", routes.finished)
    app.router.add_post("/audited", routes.audited)
    app.router.add_post("/gate", routes.set_gate)
    app.router.add_post("/epochs", routes.commit_epoch)
    app.router.add_post("/in_flight", routes.in_flight)
    app.router.add_post("/replicas", routes.add_replica)
    app.router.add_post("/replicas/{name}/drain", routes.drain_replica)
    app.router.add_delete("/replicas/{name}", routes.remove_replica)
    app.router.add_route("*", "/{other:.*}", _no_route)
    return app


async def _no_route(request: web.Request) -> web.StreamResponse:
    return _respond(not_found(request.method, request.path))


def _authorize(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            return _respond(error_reply(401, "this port needs the job's bearer token"))
        return await handler(request)

    return authorize


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors that no handler turned into a reply, in the one form that callers get."""
    try:
        return await handler(request)
    except _Refused as refused:
        return _respond(refused.reply)
    except web.HTTPException as error:
        return _respond(error_reply(error.status, error.text or error.reason))
    except web.RequestPayloadError as error:
        return _respond(error_reply(400, f"the body cannot be read: {error}"))
    except Exception:
        _log.exception("%s failed", request.path)
        return _respond(error_reply(500, "the router failed on this request; its log has the reason"))


def _respond(reply: Reply) -> web.Response:
    headers: dict[str, Any] = {"Content-Type": reply.content_type, **dict(reply.headers)}
    return web.Response(status=reply.status, body=reply.body, headers=headers)
