"""The requests that this process serves, and what is done to all of them at once.

Exchanges enter themselves through their desk; `admin.py` (with several workers: through `crew.py`) has running requests
ended, waits until engines have confirmed what was sent to them, and closes what had to stay open while the gate was
frozen.

A leg is **accepted** when its engine has begun to answer, when the engine's fence lists its request id, or (an engine
without a fence says nothing) when the kernel has taken its last byte. It has **ended** when the router has closed it
and the fence no longer lists it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from router.core.asks import Grant, Refusal
from router.core.events import HowInterrupted, Interrupted, Thawed
from router.core.finished import FinishedRequest, FinishedRequests
from router.core.fleet import ReplicaLost
from router.core.gate import Gate, GateState
from router.io.leg import Leg
from router.io.upstream import EngineReply, Upstream

if TYPE_CHECKING:
    from router.io.exchange import Exchange

_LOOK_EVERY_S = 0.02
_FENCE_TIMEOUT_S = 5.0
_NO_FENCE = (404, 405)


class RunningLeg(msgspec.Struct, frozen=True):
    """A leg that an engine works on."""

    request_id: str
    url: str


class Told(msgspec.Struct, frozen=True):
    """Who was interrupted."""

    requests: int
    legs: list[RunningLeg]
    """That they had at engines."""


_Listed = frozenset[str] | Literal["no fence", "no answer"]


class _FenceState(msgspec.Struct):
    open_requests: list[str]


class Serving:
    """See the module text."""

    def __init__(self, gate: Gate, upstream: Upstream, kept: FinishedRequests | None) -> None:
        self.open: dict[int, Exchange] = {}
        """Requests that have asked for a replica and have not left, by number."""
        self.gate = gate
        self.kept = kept
        """Finished requests, for an audit; None where none are kept."""
        self._upstream = upstream
        self._parked: list[Exchange] = []
        self._lost: list[ReplicaLost] = []
        """Replicas that went while nothing could be closed."""

    # -- for the desk --------------------------------------------------------------------------------------

    def decided(self, number: int, answer: Grant | Refusal) -> bool:
        """Tell a request that waited in line; False if it has left meanwhile."""
        exchange = self.open.get(number)
        if exchange is None:
            return False
        exchange.decided(answer)
        return True

    def park(self, exchange: Exchange) -> None:
        """A leg that is closed when the gate is no longer frozen."""
        self._parked.append(exchange)

    # -- for those who change what is around ---------------------------------------------------------------

    def end_legs(self, lost: ReplicaLost) -> None:
        """A replica is gone: its legs end, and their flows go on at once."""
        if self.gate.may_close:
            self._upstream.end_legs(lost)
        else:
            self._lost.append(lost)

    async def gate_moved(self, state: GateState) -> None:
        self.gate_moved_to(state)

    def gate_moved_to(self, state: GateState) -> None:
        """Take the gate's new state, and close what had to stay open."""
        self.gate.set(state)
        if self.gate.may_close:
            parked, self._parked = self._parked, []
            for exchange in parked:
                # Some have ended by themselves meanwhile.
                if exchange.request.number in self.open:
                    exchange.feed(Thawed())
            lost, self._lost = self._lost, []
            for each in lost:
                self._upstream.end_legs(each)

    async def interrupt(self, how: HowInterrupted, request_id: str | None = None) -> Told:
        """Tell the open requests, or those with this id, that they must not go on as they are."""
        told = [each for each in self.open.values() if request_id is None or each.client_request_id == request_id]
        legs = [_running(each.leg) for each in told if each.leg is not None]
        self.gate.keeps = self.gate.keeps or how == "keep"
        for exchange in told:
            exchange.feed(Interrupted(how))
        return Told(len(told), legs)

    def shut_down(self) -> None:
        """The router ends and can wait no longer: tell all open requests."""
        for exchange in tuple(self.open.values()):
            exchange.feed(Interrupted("shutdown"))

    async def running(self) -> list[RunningLeg]:
        return [_running(leg) for leg in self._upstream.legs()]

    async def finished(self) -> list[FinishedRequest]:
        return self.kept.all() if self.kept is not None else []

    async def settle(self, timeout_s: float) -> list[str]:
        """Wait until every leg is accepted or over; the request ids of those that are not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            unsettled = [leg for leg in self._upstream.legs() if not leg.accepted]
            await self._ask_fences(unsettled, deadline)
            unsettled = [leg for leg in unsettled if not leg.accepted and not leg.over]
            if not unsettled or time.monotonic() >= deadline:
                return [leg.command.request_id for leg in unsettled]
            await asyncio.sleep(_LOOK_EVERY_S)

    async def ended(self, legs: list[RunningLeg], timeout_s: float) -> list[str]:
        """Wait until these legs are over, at their engines too; the request ids of those that are not in time.

        A fence that does not answer proves nothing: its legs count as running.
        """
        deadline = time.monotonic() + timeout_s
        asked_for = {leg.request_id for leg in legs}
        while True:
            left = asked_for.intersection(leg.request_id for leg in await self.running())
            if not left:
                listed = await self._fences({leg.url for leg in legs}, deadline)
                left = {leg.request_id for leg in legs if _may_run(leg, listed[leg.url])}
            if not left or time.monotonic() >= deadline:
                return sorted(left)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def idle(self, url: str, timeout_s: float) -> list[str]:
        """Wait until an engine's fence lists no request; those that it lists in the end. An engine that does not
        answer, or has no fence, lists none."""
        deadline = time.monotonic() + timeout_s
        while True:
            listed = (await self._fences({url}, deadline))[url]
            if isinstance(listed, str) or not listed:
                return []
            if time.monotonic() >= deadline:
                return sorted(listed)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _ask_fences(self, legs: list[Leg], deadline: float) -> None:
        listed = await self._fences({leg.command.url for leg in legs}, deadline)
        for leg in legs:
            answer = listed[leg.command.url]
            if answer == "no fence":
                leg.accepted = leg.accepted or (leg.call is not None and leg.call.sent)
            elif answer != "no answer":
                leg.accepted = leg.accepted or leg.command.request_id in answer

    async def _fences(self, urls: set[str], deadline: float) -> dict[str, _Listed]:
        """What each engine's fence has let in and not seen end."""
        timeout_s = min(_FENCE_TIMEOUT_S, max(_LOOK_EVERY_S, deadline - time.monotonic()))
        answers = await asyncio.gather(*(self._listed(url, timeout_s) for url in urls))
        return dict(zip(urls, answers, strict=True))

    async def _listed(self, url: str, timeout_s: float) -> _Listed:
        reply = await self._upstream.ask("GET", url, "/fence", timeout_s)
        if reply == "unreachable":
            return frozenset()  # nobody is there who could run anything
        if not isinstance(reply, EngineReply):
            return "no answer"
        if reply.status in _NO_FENCE:
            return "no fence"
        try:
            state: _FenceState = msgspec.json.decode(reply.body, type=_FenceState)
        except msgspec.MsgspecError:
            return "no answer"
        return frozenset(state.open_requests)


def _running(leg: Leg) -> RunningLeg:
    return RunningLeg(leg.command.request_id, leg.command.url)


def _may_run(leg: RunningLeg, listed: _Listed) -> bool:
    """A leg that the router has closed: can its engine still be at it? Without a fence nobody can say."""
    return listed == "no answer" or (listed != "no fence" and leg.request_id in listed)
