"""Who may be sent where, and when: the one place that all requests of a job go through.

`flow.py` asks for a replica per leg, this answers: at once, later, or with a refusal. Gate, epochs, room and the line
of those who wait are decided here; `fleet.py` chooses and reserves. Answers that come later stand in `outbox`, which
the shell empties after each call.

A request waits in a lane, which is named by what it waits for: the gate, room in total, room on a role's replicas, a
weight version. Within a lane it is first come, first served, by the request's place: one that comes back (its engine
leg was ended for an update, or its replica died) is ahead of those that arrived after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.epochs import Epochs
from router.core.fleet import Fleet
from router.core.gate import Gate
from router.core.sessions import Session
from router.settings import EngineRole, RouterSettings

Lane = tuple[str, int]
_GATE: Lane = ("gate", 0)
_TOTAL: Lane = ("total", 0)
_VERSION: Lane = ("version", 0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a router takes on at most. None: any number."""

    max_requests: int | None
    max_waiting: int
    max_wait_s: float
    skip_prefill_below_tokens: int

    @classmethod
    def of(cls, settings: RouterSettings) -> Limits:
        return cls(
            max_requests=settings.max_requests,
            max_waiting=settings.max_waiting,
            max_wait_s=settings.max_wait_s,
            skip_prefill_below_tokens=settings.skip_prefill_below_tokens,
        )


class _Request(msgspec.Struct, eq=False):
    number: int
    session: Session
    admitted: bool = False
    """It has been granted a leg: from then on it counts towards the total."""
    ask: Ask | None = None
    """What it waits for."""
    lane: Lane | None = None
    until: float = 0.0


class Dispatcher:
    """See the module text."""

    def __init__(self, *, fleet: Fleet, gate: Gate, epochs: Epochs, limits: Limits) -> None:
        self.fleet = fleet
        self.gate = gate
        self.epochs = epochs
        self.outbox: list[tuple[int, Grant | Refusal]] = []
        self._limits = limits
        self._requests: dict[int, _Request] = {}
        self._waiting: dict[int, _Request] = {}
        self._lanes: dict[Lane, list[tuple[int, int]]] = {}
        """Heaps of (place, number)."""
        self._admitted = 0

    # -- requests ------------------------------------------------------------------------------------------

    def ask(self, ask: Ask, now: float) -> Grant | Refusal | None:
        """A replica for a leg; None: the answer will stand in `outbox`."""
        request = self._requests.get(ask.request)
        if request is None:
            session = self.fleet.sessions.begin_request(ask.session, lasts=ask.session_lasts)
            request = self._requests[ask.request] = _Request(ask.request, session)
        elif self._waiting.pop(ask.request, None) is not None:
            # It asks anew before it was answered: what it asked before no longer counts.
            request.ask = request.lane = None
        answer = self._decide(request, ask, now)
        if not isinstance(answer, tuple):
            return answer
        is_new = not request.admitted and ask.place == ask.request
        if is_new and len(self._waiting) >= self._limits.max_waiting:
            message = f"{self._reason(answer)}, and {len(self._waiting)} requests wait already"
            return Refusal(serial=ask.serial, kind="line_full", message=message)
        request.ask, request.until = ask, now + self._limits.max_wait_s
        self._waiting[request.number] = request
        self._join(request, ask, answer)
        return None

    def end_leg(self, end: LegEnd, now: float) -> None:
        """A granted leg is over, however it went; its place is free."""
        reservation = self.fleet.end_leg(end, now)
        if self._waiting:
            self._serve_role(reservation.member.role, now)

    def leave(self, number: int, now: float) -> None:
        """A request is over. Its legs have ended before."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        self._waiting.pop(number, None)
        self.fleet.end_request(request.session, now)
        if request.admitted:
            self._admitted -= 1
            if self._waiting:
                self._serve(_TOTAL, now)

    # -- what changes around them --------------------------------------------------------------------------

    def look_again(self, now: float) -> None:
        """The gate, a replica or an epoch has changed: whoever waits is asked after anew."""
        for lane in list(self._lanes):
            self._serve(lane, now)

    def tick(self, now: float) -> None:
        """Time has passed: sessions fall idle, waits become too long."""
        self.fleet.expire_sessions(now)
        if not self._waiting:
            return
        self.look_again(now)
        for request in [each for each in self._waiting.values() if now >= each.until]:
            assert request.lane is not None, "waiting outside of any lane"
            assert request.ask is not None, "waiting for nothing"
            message = f"waited {self._limits.max_wait_s:g} s in line: {self._reason(request.lane)}"
            self._tell(request, Refusal(serial=request.ask.serial, kind="waited_too_long", message=message))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def between_legs(self) -> int:
        """Requests that wait with a handoff in hand."""
        return sum(each.ask is not None and each.ask.handoff_epoch is not None for each in self._waiting.values())

    @property
    def admitted(self) -> int:
        return self._admitted

    def not_ready_reason(self) -> str | None:
        """Why no new request can be served now; None if one can."""
        if not self.gate.may_start:
            return self._reason(_GATE)
        if self.fleet.paired or self.fleet.alone:
            return None
        return self._missing()

    # -- decisions -----------------------------------------------------------------------------------------

    def _decide(self, request: _Request, ask: Ask, now: float) -> Grant | Refusal | Lane:
        """A grant, a refusal, or the lane to wait in."""
        if ask.handoff_epoch is not None:
            return self._decide_second(request, ask, ask.handoff_epoch, now)
        if not self.gate.may_start:
            return _GATE
        if (
            not request.admitted
            and self._limits.max_requests is not None
            and self._admitted >= self._limits.max_requests
        ):
            return _TOTAL
        pairs, alone = self.fleet.paired, self.fleet.alone
        if ask.min_version is not None:
            first = self.epochs.first_with(ask.min_version)
            if first is None:
                return _VERSION
            usable = bool(pairs or alone)
            pairs, alone = [each for each in pairs if each >= first], [each for each in alone if each >= first]
            if usable and not pairs and not alone:
                return _VERSION
        if pairs:
            below = self._limits.skip_prefill_below_tokens
            role: EngineRole = "decode" if below and self._skips_prefill(request, ask, pairs, below) else "prefill"
            return self._place(request, ask, role, pairs, now)
        if alone:
            return self._place(request, ask, "colocated", alone, now)
        return Refusal(serial=ask.serial, kind="no_replica", message=self._missing())

    def _decide_second(self, request: _Request, ask: Ask, epoch: int, now: float) -> Grant | Refusal | Lane:
        if not self.gate.may_continue:
            return _GATE
        if not self.fleet.is_served("decode", epoch):
            return Refusal(serial=ask.serial, kind="no_pair", message=f"no usable decode replica in epoch {epoch}")
        return self._place(request, ask, "decode", [epoch], now)

    def _place(
        self, request: _Request, ask: Ask, role: EngineRole, epochs: list[int], now: float
    ) -> Grant | Refusal | Lane:
        made = self.fleet.place(
            request.session, role, epochs, tokens=ask.tokens, now=now, avoid=ask.avoid, key=str(ask.request)
        )
        if made is None:
            return (role, 0 if ask.handoff_epoch is None else ask.handoff_epoch)
        if not request.admitted:
            request.admitted = True
            self._admitted += 1
        member = made.member
        return Grant(
            ticket=made.ticket,
            serial=ask.serial,
            role=member.role,
            replica=member.name,
            url=member.url,
            instance=member.instance,
            epoch=made.epoch,
            version=self.epochs.version_of(made.epoch),
            reason=made.reason,
        )

    def _skips_prefill(self, request: _Request, ask: Ask, epochs: list[int], below: int) -> bool:
        """Would the pinned decode replica compute so little of this follow-up that a prefill leg costs more?"""
        session = request.session
        pinned = session.decode
        if pinned is None or not pinned.present or pinned.name in ask.avoid or pinned.epoch not in epochs:
            return False
        return session.known_epoch == pinned.epoch and 0 <= ask.tokens - session.known_tokens < below

    # -- the line ------------------------------------------------------------------------------------------

    def _join(self, request: _Request, ask: Ask, lane: Lane) -> None:
        request.lane = lane
        heappush(self._lanes.setdefault(lane, []), (ask.place, request.number))

    def _serve_role(self, role: EngineRole, now: float) -> None:
        for lane in [each for each in self._lanes if each[0] == role]:
            self._serve(lane, now)

    def _serve(self, lane: Lane, now: float) -> None:
        """Answer a lane in order. Where all wait for the same room, the first that gets none ends it, unless it is
        choosier than those behind it."""
        entries, kept = self._lanes.get(lane, []), []
        same_for_all = lane not in (_GATE, _VERSION)
        while entries:
            entry = heappop(entries)
            request = self._waiting.get(entry[1])
            if request is None or request.lane != lane or request.ask is None:
                continue
            answer = self._decide(request, request.ask, now)
            if not isinstance(answer, tuple):
                self._tell(request, answer)
            elif answer != lane:
                self._join(request, request.ask, answer)
            else:
                kept.append(entry)
                if same_for_all and request.ask.min_version is None:
                    break
        for entry in kept:
            heappush(entries, entry)
        if not entries:
            self._lanes.pop(lane, None)

    def _tell(self, request: _Request, answer: Grant | Refusal) -> None:
        request.ask = request.lane = None
        del self._waiting[request.number]
        self.outbox.append((request.number, answer))

    def _reason(self, lane: Lane) -> str:
        if lane == _GATE:
            return f"the router's gate is {self.gate.state}: requests are not sent to engines now"
        if lane == _TOTAL:
            return f"{self._admitted} requests are being served, which is max_requests"
        if lane == _VERSION:
            return "no replica serves the weight version that x-headrace-min-version asks for"
        return f"no {lane[0]} replica has room"

    def _missing(self) -> str:
        fleet = self.fleet
        roles = {member.role for member in fleet.members.values()}
        if "colocated" in roles and "prefill" not in roles and "decode" not in roles:
            return "no usable colocated replica"
        pair: tuple[EngineRole, ...] = ("prefill", "decode")
        missing = next((role for role in pair if not fleet.usable_count(role)), None)
        return (
            f"no usable {missing} replica"
            if missing
            else "no epoch has both a usable prefill and a usable decode replica"
        )
