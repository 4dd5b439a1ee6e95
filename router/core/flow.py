"""One client request, from its arrival to its end: events in, commands out.

`io/server.py` makes a `Flow` per request, `io/exchange.py` feeds it what happens and does what it says. Sessions, load
and health are in `fleet.py`, the gate in `gate.py`, the bodies in `split.py`.

    new --Arrived--> prefill --P answered--> decode --first line--> relaying --> done
                        ^                      |  \\--whole reply--> done
                        +---- fresh attempt ---+
A fleet of colocated replicas has one leg, which lives in the state "decode". At most one leg is alive, so a
request never has two live copies.

Rules that are easy to undo by accident:
- **Age of a handoff.** Its lease starts when the P engine ends the leg, a moment that the router can't see: the
  reply may have waited in a socket or behind a stalled loop, and the reply's own expiry field is
  empty on the prefill side. So the age counts from when the P leg was *sent*, plus the time that the engine says it
  worked (if it says so): never too young. Without the engine's word a P leg slower than lease - margin is run again
  (from the engine's own cache); when the attempts are used up the D leg goes without a handoff, slower and right.
  Connecting takes time too: the D leg carries `send_by`, after which the shell sends nothing and says `HandoffExpired`.
- **A handoff is used at most once**: it is a local of the step that receives it.
- **Retries** happen only while the client has seen nothing, and each is a fresh attempt with a new id and a new P leg.
- **4xx is the client's**: passed on as it is, not retried, blamed on nobody.
- **One deadline** covers all legs and attempts. When it ends a leg, the replica is blamed only if it had the request
  for at least half of the time: the last leg of a slow request is not at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from router.core.commands import (
    Answer,
    CancelLeg,
    Command,
    CountClientGone,
    CountHandoff,
    CountLeg,
    CountRetry,
    EndRelay,
    LegOutcome,
    SendLeg,
    StartRelay,
)
from router.core.errors import InvalidTransition, RequestRefused
from router.core.events import (
    Arrived,
    ClientGone,
    Event,
    HandoffExpired,
    LegAnswered,
    LegFailed,
    LegStreaming,
    StreamEnded,
)
from router.core.fleet import Fleet, Reservation, gate_message, missing_message
from router.core.gate import Gate
from router.core.replies import JSON, Reply, error_event, error_reply, retry_headers
from router.core.sessions import Session
from router.core.split import (
    ClientBody,
    PrefillResult,
    check_split,
    decode_body,
    merge_reply,
    parse_body,
    prefill_body,
    read_prefill_reply,
    reply_failed,
    single_body,
)
from router.core.stream import StreamMerge, failed_event
from router.core.table import LegFailure
from router.settings import EngineRole

State = Literal["new", "prefill", "decode", "relaying", "done"]

_FAILURE_STATUS: dict[LegFailure, int] = {"unreachable": 503, "broken": 502, "timeout": 504, "engine_error": 502}
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class FlowRules:
    """The settings that a request obeys."""

    retries: int
    request_timeout_s: float
    """For the whole request: all its legs and attempts."""
    handoff_lifetime_s: float
    """Lease minus margin: an older handoff is never sent."""
    session_fields: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leg:
    number: int
    reservation: Reservation
    sent_at: float


class Flow:
    """See the module text."""

    def __init__(self, *, fleet: Fleet, gate: Gate, rules: FlowRules) -> None:
        self.state: State = "new"
        self.client_request_id: str | None = None
        """The id in the client's body, known after `Arrived`."""
        self._fleet = fleet
        self._gate = gate
        self._rules = rules
        self._path = self._key = ""
        self._deadline = 0.0
        self._body: ClientBody | None = None
        self._session: Session | None = None
        self._attempts = 0
        self._legs = 0
        self._leg: _Leg | None = None
        self._avoid: frozenset[str] = frozenset()
        self._prefill: PrefillResult | None = None
        self._merge: StreamMerge | None = None
        self._served_by: dict[str, str] = {}
        self._story: list[str] = []

    def step(self, event: Event, now: float) -> list[Command]:
        """Take one event; what the shell has to do, in order."""
        handler = _TRANSITIONS.get((self.state, type(event)))
        self._story.append(f"{self.state}: {type(event).__name__}")
        if handler is None:
            raise InvalidTransition("; ".join(self._story))
        commands: list[Command] = handler(self, event, now)
        return commands

    # -- events ------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> list[Command]:
        if not self._gate.may_start:
            return self._answer(error_reply(503, gate_message(self._gate)), now)
        self._path, self._key = event.path, event.request_key
        self._deadline = now + self._rules.request_timeout_s
        try:
            self._body = parse_body(
                event.body, session_header=event.session_header, session_fields=self._rules.session_fields
            )
        except RequestRefused as refused:
            return self._refuse(refused, now)
        self.client_request_id = self._body.request_id
        self._session = self._fleet.begin_request(self._body.session_id)
        return self._start_attempt(now)

    def _prefill_answered(self, event: LegAnswered, now: float) -> list[Command]:
        leg = self._leg_of(event.leg)
        result = read_prefill_reply(event.body) if 200 <= event.status < 300 else None
        if result is None or result.failed:
            return self._not_served(event, now)
        commands = self._end_leg("ok")
        self._prefill = result
        if not self._gate.may_continue:
            return [
                *commands,
                *self._drop(result.handoff),
                *self._answer(error_reply(503, gate_message(self._gate)), now),
            ]
        if result.handoff is None:
            return [*commands, CountHandoff(outcome="missing"), *self._send_decode(None, now)]
        # The engine can't have ended the leg before it was sent and worked on.
        send_by = leg.sent_at + result.busy_s + self._rules.handoff_lifetime_s
        if now > send_by:
            return [*commands, *self._renew_handoff(now)]
        return [*commands, *self._send_decode(result.handoff, now, send_by)]

    def _handoff_expired(self, event: HandoffExpired, now: float) -> list[Command]:
        """The D leg was not sent in time. Its replica has seen nothing of it and is not blamed."""
        self._leg_of(event.leg)
        commands = self._end_leg("expired")
        if not self._gate.may_continue:
            return [*commands, *self._answer(error_reply(503, gate_message(self._gate)), now)]
        return [*commands, *self._renew_handoff(now)]

    def _decode_answered(self, event: LegAnswered, now: float) -> list[Command]:
        if not 200 <= event.status < 300 or reply_failed(event.body):
            return self._not_served(event, now)
        commands = self._end_leg("ok")
        body = merge_reply(event.body, self._prefill)
        return [*commands, *self._answer(Reply(status=event.status, body=body, content_type=event.content_type), now)]

    def _streaming(self, event: LegStreaming, now: float) -> list[Command]:
        leg = self._leg_of(event.leg)
        if self.state == "prefill" or failed_event(event.head):
            detail = f"the engine answered with {'a stream' if self.state == 'prefill' else 'an error event'}"
            return [CancelLeg(leg=leg.number), *self._leg_failed_with("engine_error", detail, None, now)]
        self._fleet.byte_seen(leg.reservation.replica, now)
        self._merge = StreamMerge(self._prefill)
        self.state = "relaying"
        return [
            StartRelay(
                leg=leg.number,
                replica=leg.reservation.replica,
                headers=self._headers(),
                content_type=event.content_type,
                first=self._merge.feed(event.head),
                merge=self._merge,
            )
        ]

    def _leg_failed(self, event: LegFailed, now: float) -> list[Command]:
        self._leg_of(event.leg)
        return self._leg_failed_with(event.failure, event.detail, None, now)

    def _stream_ended(self, event: StreamEnded, now: float) -> list[Command]:
        self._leg_of(event.leg)
        assert self._merge is not None, "relaying without a merge"
        commands = self._blame("engine_error", now) if self._merge.engine_failed else self._end_leg("ok")
        self._close(now)
        return [*commands, EndRelay(last=self._merge.flush())]

    def _stream_broke(self, event: LegFailed, now: float) -> list[Command]:
        """The client has seen bytes: it is told inside its stream, where OpenAI clients look for errors."""
        leg = self._leg_of(event.leg)
        message = f"{leg.reservation.replica} stopped in the middle of its reply: {event.detail}"
        commands = self._blame(event.failure, now)
        self._close(now)
        return [*commands, EndRelay(last=error_event(_FAILURE_STATUS[event.failure], message))]

    def _client_gone(self, _event: ClientGone, now: float) -> list[Command]:
        commands: list[Command] = [CountClientGone()]
        if self._leg is not None:
            commands.append(CancelLeg(leg=self._leg.number))
            commands += self._end_leg("cancelled")
        self._close(now)
        return commands

    def _too_late(self, _event: ClientGone, _now: float) -> list[Command]:
        return []

    # -- legs ----------------------------------------------------------------------------------------------

    def _start_attempt(self, now: float) -> list[Command]:
        assert self._body is not None, "an attempt without a body"
        self._prefill = None
        if not self._gate.may_start:
            return self._answer(error_reply(503, gate_message(self._gate)), now)
        layout = self._fleet.layout()
        if layout.kind == "split":
            # Not at arrival: an attempt may meet another layout than the one before it.
            try:
                check_split(self._body)
            except RequestRefused as refused:
                return self._refuse(refused, now)
        if layout.missing is not None:
            return self._none_usable(layout.missing, now)
        self._attempts += 1
        self._served_by = {}
        if layout.kind == "single":
            return self._send("colocated", single_body(self._body), now) or self._none_usable("colocated", now)
        return self._send("prefill", prefill_body(self._body), now) or self._none_usable("prefill", now)

    def _renew_handoff(self, now: float) -> list[Command]:
        """In place of a handoff that is too old: a fresh attempt, or a D leg that runs the prompt itself."""
        expired = CountHandoff(outcome="expired")
        if self._may_retry(now):
            return [expired, CountRetry(), *self._start_attempt(now)]
        return [expired, *self._send_decode(None, now)]

    def _send_decode(self, handoff: bytes | None, now: float, send_by: float | None = None) -> list[Command]:
        """The second leg, with the handoff if one is given."""
        assert self._body is not None, "a leg without a body"
        if now >= self._deadline:
            return [*self._drop(handoff), *self._answer(error_reply(504, self._out_of_time()), now)]
        sent = self._send("decode", decode_body(self._body, handoff), now, send_by)
        if not sent:
            return [*self._drop(handoff), *self._none_usable("decode", now)]
        return [*([CountHandoff(outcome="sent")] if handoff is not None else []), *sent]

    def _send(self, role: EngineRole, body: bytes, now: float, send_by: float | None = None) -> list[Command]:
        """Reserve a replica and send a leg there; nothing if no replica is usable."""
        assert self._session is not None, "a leg without a session"
        assert self._leg is None, "a second live leg"
        assert self._body is not None, "a leg without a body"
        tokens = len(self._body.raw) // _BYTES_PER_TOKEN + 1
        reservation = self._fleet.place(self._session, role, tokens=tokens, avoid=self._avoid)
        if reservation is None:
            return []
        self._legs += 1
        self._leg = _Leg(number=self._legs, reservation=reservation, sent_at=now)
        self._served_by |= _served(role, reservation.replica)
        self.state = "prefill" if role == "prefill" else "decode"
        return [
            SendLeg(
                leg=self._legs,
                role=role,
                replica=reservation.replica,
                url=self._fleet.table[reservation.replica].url + self._path,
                body=body,
                request_id=f"{self._key}-{self._attempts}",
                timeout_s=self._deadline - now,
                send_by=send_by,
            )
        ]

    def _not_served(self, event: LegAnswered, now: float) -> list[Command]:
        """A reply that is no success: the client's mistake, or the engine's failure."""
        headers = retry_headers(event.status)
        reply = Reply(status=event.status, body=event.body, content_type=event.content_type, headers=headers)
        if 400 <= event.status < 500:
            return [*self._end_leg("client_error"), *self._answer(reply, now)]
        own = event.status >= 500 and event.content_type.startswith(JSON)
        detail = f"the engine answered {event.status}" + (" and failed" if event.status < 300 else "")
        return self._leg_failed_with("engine_error", detail, reply if own else None, now)

    def _leg_failed_with(self, failure: LegFailure, detail: str, reply: Reply | None, now: float) -> list[Command]:
        """Blame the replica; try again while that is allowed, else answer, if possible with the engine's own reply."""
        assert self._leg is not None, "a failure without a leg"
        name = self._leg.reservation.replica
        commands = self._blame(failure, now)
        self._avoid |= {name}
        if failure != "timeout" and self._may_retry(now):
            return [*commands, CountRetry(), *self._start_attempt(now)]
        message = f"{name}: {self._out_of_time() if failure == 'timeout' else detail}"
        return [*commands, *self._answer(reply or error_reply(_FAILURE_STATUS[failure], message), now)]

    def _may_retry(self, now: float) -> bool:
        return self._attempts <= self._rules.retries and self._gate.may_start and now < self._deadline

    def _blame(self, failure: LegFailure, now: float) -> list[Command]:
        assert self._leg is not None, "blame without a leg"
        if failure != "timeout" or now - self._leg.sent_at >= self._rules.request_timeout_s / 2:
            self._fleet.leg_failed(self._leg.reservation.replica, failure)
        return self._end_leg(failure)

    def _end_leg(self, outcome: LegOutcome) -> list[Command]:
        assert self._leg is not None, "no leg to end"
        reservation, self._leg = self._leg.reservation, None
        self._fleet.release(reservation)
        if outcome in ("ok", "client_error"):
            self._fleet.leg_succeeded(reservation.replica)
        return [CountLeg(role=reservation.role, outcome=outcome)]

    def _leg_of(self, number: int) -> _Leg:
        assert self._leg is not None, f"leg {number} is over"
        assert self._leg.number == number, f"leg {number} is not leg {self._leg.number}"
        return self._leg

    # -- the end -------------------------------------------------------------------------------------------

    def _refuse(self, refused: RequestRefused, now: float) -> list[Command]:
        return self._answer(error_reply(400, refused.message, refused.param), now)

    def _none_usable(self, role: EngineRole, now: float) -> list[Command]:
        return self._answer(error_reply(503, missing_message(role)), now)

    def _answer(self, reply: Reply, now: float) -> list[Command]:
        self._close(now)
        headers = (*reply.headers, *self._headers())
        return [
            Answer(reply=Reply(status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers))
        ]

    def _close(self, now: float) -> None:
        self.state = "done"
        if self._session is not None:
            self._fleet.end_request(self._session, now)
            self._session = None

    def _headers(self) -> tuple[tuple[str, str], ...]:
        return tuple((f"x-headrace-{part}", name) for part, name in self._served_by.items())

    def _out_of_time(self) -> str:
        return f"no whole answer within {self._rules.request_timeout_s:g} s"

    @staticmethod
    def _drop(handoff: bytes | None) -> list[CountHandoff]:
        """Count a handoff that will not be used: its blocks stay held until the lease is over."""
        return [CountHandoff(outcome="unused")] if handoff is not None else []


def _served(role: EngineRole, replica: str) -> dict[str, str]:
    """Which parts of the reply a replica of this role makes."""
    if role == "colocated":
        return {"prefill": replica, "decode": replica}
    return {role: replica}


_TRANSITIONS: dict[tuple[State, type[Event]], Callable[[Flow, Any, float], list[Command]]] = {
    ("new", Arrived): Flow._arrived,
    ("new", ClientGone): Flow._client_gone,
    ("prefill", LegAnswered): Flow._prefill_answered,
    ("prefill", LegStreaming): Flow._streaming,
    ("prefill", LegFailed): Flow._leg_failed,
    ("prefill", ClientGone): Flow._client_gone,
    ("decode", LegAnswered): Flow._decode_answered,
    ("decode", LegStreaming): Flow._streaming,
    ("decode", LegFailed): Flow._leg_failed,
    ("decode", HandoffExpired): Flow._handoff_expired,
    ("decode", ClientGone): Flow._client_gone,
    ("relaying", StreamEnded): Flow._stream_ended,
    ("relaying", LegFailed): Flow._stream_broke,
    ("relaying", ClientGone): Flow._client_gone,
    ("done", ClientGone): Flow._too_late,
}
