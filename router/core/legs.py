"""The legs of one request and the handoff between them: at most one leg is alive, and a handoff is used at most once.

`flow.py` decides when; this builds what is sent, keeps the handoff's age and says how a leg is ended. Salt, epoch and
instance belong to a leg's grant: they are put into the body at the moment the leg is sent, never before.

**Age of a handoff.** Its lease starts when the P engine ends the leg, a moment that the router can't see: the
reply may have waited in a socket or behind a stalled loop, and the reply's own expiry field is
empty on the prefill side. So the age counts from when the P leg was *sent*, plus the time that the engine says it
worked (if it says so): never too young. Connecting takes time too: the D leg carries `send_by`, after which the shell
sends nothing and says `HandoffExpired`.
"""

from __future__ import annotations

import msgspec

from router.core.asks import Grant, LegEnd, LegOutcome
from router.core.commands import CancelLeg, Command, CountChoice, CountHandoff, CountLeg, EndLeg, ParkLeg, SendLeg
from router.core.continuation import Continuation
from router.core.events import Arrived
from router.core.label import Making
from router.core.rules import FlowTools
from router.core.split import ClientBody, PrefillResult, decode_body, prefill_body, single_body


class Leg(msgspec.Struct, eq=False):
    """A leg that an engine has."""

    number: int
    grant: Grant
    sent_at: float
    handoff_from: str


class _Handoff(msgspec.Struct, frozen=True, eq=False):
    text: bytes
    made_by: str
    send_by: float


class Legs:
    """See the module text."""

    __slots__ = (
        "_arrival",
        "_asked",
        "_attempt",
        "_body",
        "_continuation",
        "_deadline",
        "_handoff",
        "_number",
        "_rules",
        "_salter",
        "live",
        "making",
        "prefill",
    )

    def __init__(
        self, body: ClientBody, asked: ClientBody | None, arrival: Arrived, tools: FlowTools, deadline: float
    ) -> None:
        self.live: Leg | None = None
        self.making = Making()
        self.prefill: PrefillResult | None = None
        """What the P leg of this attempt said, for the reply of the D leg."""
        self._body = body
        self._asked = asked or body
        """What the engine is asked that makes the reply."""
        self._continuation: Continuation | None = None
        self._arrival = arrival
        self._rules, self._salter = tools.rules, tools.salter
        self._deadline = deadline
        self._attempt = self._number = 0
        self._handoff: _Handoff | None = None

    def go_on(self, continuation: Continuation) -> None:
        """From now on the legs run the rest of a stream."""
        self._continuation = continuation
        self._body = self._asked = continuation.body

    def begin_attempt(self) -> None:
        """A fresh pair, with an id of its own."""
        assert self.live is None, "an attempt beside a live leg"
        assert self._handoff is None, "an attempt with a handoff left over"
        self._attempt += 1
        self.prefill = None
        self.making.begin_attempt()

    # -- sending -------------------------------------------------------------------------------------------

    def send_first(self, grant: Grant, now: float) -> list[Command]:
        """The P leg; the only leg of a colocated replica, or of a decode replica that runs the prompt itself."""
        salt = self._salter.salt(grant.epoch, self._body.cache_salt)
        if grant.role == "prefill":
            return self._send(grant, prefill_body(self._body, salt=salt), None, now)
        return self._send(grant, single_body(self._asked, salt=salt), None, now)

    def send_second(self, grant: Grant, now: float) -> list[Command] | None:
        """The D leg, with the handoff if there is one; None if that has become too old."""
        handoff = self._handoff
        if handoff is not None and now > handoff.send_by:
            return None
        salt = self._salter.salt(grant.epoch, self._body.cache_salt)
        if handoff is None:
            return self._send(grant, decode_body(self._asked, None, salt=salt), None, now)
        self._handoff = None
        body = decode_body(self._asked, handoff.text, salt=salt)
        return [CountHandoff(outcome="sent"), *self._send(grant, body, handoff, now)]

    def _send(self, grant: Grant, body: bytes, handoff: _Handoff | None, now: float) -> list[Command]:
        assert self.live is None, "a second live leg"
        self._number += 1
        self.live = Leg(self._number, grant, now, handoff.made_by if handoff is not None else "")
        self.making.add(grant)
        limit_s = self._rules.leg_timeout_s
        if self._continuation is not None:
            body = self._continuation.leg_body(body)
        return [
            CountChoice(role=grant.role, reason=grant.reason),
            SendLeg(
                leg=self._number,
                role=grant.role,
                replica=grant.replica,
                instance=grant.instance,
                epoch=grant.epoch,
                url=grant.url,
                path=self._arrival.path,
                body=body,
                request_id=f"{self._arrival.request_key}-{self._attempt}",
                until=self._deadline if limit_s is None else min(self._deadline, now + limit_s),
                deadline=self._deadline,
                send_by=handoff.send_by if handoff is not None else None,
            ),
        ]

    # -- the handoff ---------------------------------------------------------------------------------------

    def take_handoff(self, leg: Leg, result: PrefillResult, now: float) -> bool:
        """Keep what the P leg handed over; False if it is too old already."""
        self.prefill = result
        if result.handoff is None:
            return True
        # The engine can't have ended the leg before it was sent and worked on.
        send_by = leg.sent_at + result.busy_s + self._rules.handoff_lifetime_s
        self._handoff = _Handoff(result.handoff, leg.grant.replica, send_by) if now <= send_by else None
        return now <= send_by

    def forget_handoff(self) -> None:
        self._handoff = None

    def drop_handoff(self) -> list[Command]:
        """Count a handoff that will not be used: its blocks stay held until the lease is over."""
        dropped, self._handoff = self._handoff, None
        return [CountHandoff(outcome="unused")] if dropped is not None else []

    # -- ending --------------------------------------------------------------------------------------------

    def live_leg(self, number: int | None = None) -> Leg:
        """The live leg, which must be this one."""
        assert self.live is not None, f"leg {number} is over"
        assert number is None or self.live.number == number, f"leg {number} is not leg {self.live.number}"
        return self.live

    def end(
        self, outcome: LegOutcome, now: float, *, blamed: bool = False, cached_tokens: int | None = None
    ) -> list[Command]:
        """The live leg is over; its connection is closed or back in the pool."""
        leg, self.live = self.live_leg(), None
        end = LegEnd(
            ticket=leg.grant.ticket,
            outcome=outcome,
            blamed=blamed,
            seconds=now - leg.sent_at,
            cached_tokens=cached_tokens,
            handoff_from=leg.handoff_from,
        )
        return [EndLeg(end), CountLeg(role=leg.grant.role, outcome=outcome)]

    def close(self, outcome: LegOutcome, now: float, *, blamed: bool = False) -> list[Command]:
        """End the live leg by closing its connection."""
        return [CancelLeg(leg=self.live_leg().number), *self.end(outcome, now, blamed=blamed)]

    def stop(self, outcome: LegOutcome, now: float, *, may_close: bool, blamed: bool = False) -> list[Command]:
        """Nobody waits for what is made of the request any more: a live leg is closed, or parked where nothing may be
        closed; a handoff stays unused."""
        if self.live is None:
            return self.drop_handoff()
        if may_close:
            return self.close(outcome, now, blamed=blamed)
        return [ParkLeg(leg=self.live.number)]
