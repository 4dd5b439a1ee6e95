r"""One client request, from its arrival to its end: events in, commands out.

`io/exchange.py` makes a `Flow` per request, feeds it what happens and does what it says. Which replica, and when, is
the dispatcher's answer; the bodies are `split.py`'s.

    new --> asking --Grant--> prefill --P reply--> asking_second --Grant--> decode --first line--> relaying --> done
              ^                                                                   |  \--whole reply--> done
              +------------------------ resting, a fresh attempt -----------------+
A fleet of colocated replicas has one leg, which lives in the state "decode". At most one leg is alive, so a request
never has two live copies. While the gate is frozen a leg that nobody waits for any more is "parked", not closed.

Rules that are easy to undo by accident:
- **A handoff that is too old** (see `legs.py`) is renewed by a fresh attempt; when the attempts are used up the D leg
  goes without one, slower and right.
- **Retries** happen only while the client has seen nothing, and each is a fresh attempt with a new id and a new P leg.
- **4xx is the client's**: passed on as it is, not retried, blamed on nobody.
- **One deadline** covers all legs and attempts. When it ends a leg, the replica is blamed only if it had the request
  for at least half of the time: the last leg of a slow request is not at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.core.asks import Grant, LegEnd, Refusal
from router.core.client_stream import ClientStream
from router.core.commands import (
    Answer,
    Command,
    ContinueRelay,
    CountClientGone,
    CountHandoff,
    CountReadmitted,
    EndLeg,
    EndRelay,
    GatherSamples,
    Pause,
    StartRelay,
)
from router.core.errors import InvalidTransition, RequestRefused
from router.core.events import (
    Arrived,
    ClientGone,
    Event,
    HandoffExpired,
    Interrupted,
    LegAnswered,
    LegFailed,
    LegStreaming,
    StreamEnded,
    Thawed,
    TimeReached,
)
from router.core.failures import (
    ABORTED_STATUS,
    ASKED_TO_END,
    FAILURE_STATUS,
    INTERRUPTED,
    SHUTTING_DOWN,
    failed,
    passed_on,
    unserved,
)
from router.core.fanout import has_several, samples, samples_per_prompt
from router.core.legs import Legs
from router.core.moves import Moves, State
from router.core.replies import Reply, error_event, error_reply
from router.core.split import check_single, check_split, merge_reply, parse_body, read_prefill_reply, reply_failed
from router.core.stream import failed_event

_LOOK_AGAIN_S = 0.5


class Flow(Moves):
    """See the module text."""

    def step(self, event: Event, now: float) -> list[Command]:
        """Take one event; what the shell has to do, in order."""
        if isinstance(event, _ANSWERS) and event.serial != self._asks:
            # It answers an older question: one that the request no longer waits for.
            return [EndLeg(LegEnd(event.ticket, "cancelled"))] if isinstance(event, Grant) else []
        self._story.append(self.state)
        handler = _TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise InvalidTransition(f"{' > '.join(self._story)}: {type(event).__name__}")
        commands: list[Command] = handler(self, event, now)
        return commands

    # -- arrival and grants ------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> list[Command]:
        self._arrival = event
        self._deadline = event.deadline if event.deadline is not None else now + self._rules.request_timeout_s
        try:
            self._body = event.sample or parse_body(
                event.body,
                route=event.route,
                session_header=event.session_header,
                session_fields=self._rules.session_fields,
            )
        except RequestRefused as refused:
            self.state = "done"
            return [Answer(reply=error_reply(400, refused.message, refused.param))]
        self.client_request_id = self._body.request_id
        self._session = self._body.session_id
        if self._session is None and (event.sample_of is not None or has_several(self._body)):
            # So that the samples go where their request was placed.
            self._session = (event.sample_of or event).request_key
        self._stream = ClientStream(self._body, kept=self._rules.readmit_streams)
        self.legs = Legs(self._body, self._stream.asked, event, self._tools, self._deadline)
        return self._start_attempt()

    def _first_granted(self, grant: Grant, now: float) -> list[Command]:
        if not self._gate.may_start:
            return self._back_in_line(grant, None)
        # Not at arrival: only now it is known whether the legs are separate.
        end = EndLeg(LegEnd(grant.ticket, "cancelled"))
        try:
            if grant.role == "colocated":
                check_single(self._body)
            elif (parts := samples(self._body, limit=self._rules.max_samples)) is not None:
                each = samples_per_prompt(self._body)
                gather = GatherSamples(body=self._body, parts=parts, per_prompt=each, deadline=self._deadline)
                # Its samples go ahead of who waits for its place.
                return [gather, end, self._leave()]
            else:
                check_split(self._body)
        except RequestRefused as refused:
            return [end, *self._answer(error_reply(400, refused.message, refused.param))]
        self.state = "prefill" if grant.role == "prefill" else "decode"
        return self.legs.send_first(grant, now)

    def _second_granted(self, grant: Grant, now: float) -> list[Command]:
        if not self._gate.may_continue:
            return self._back_in_line(grant, grant.epoch)
        sent = self.legs.send_second(grant, now)
        if sent is None:
            end = EndLeg(LegEnd(grant.ticket, "expired"))
            return [end, *self._renew_handoff(grant.epoch, now)]
        self.state = "decode"
        return sent

    def _refused(self, refusal: Refusal, _now: float) -> list[Command]:
        dropped = self.legs.drop_handoff()
        if refusal.kind == "no_pair":
            # The handoff's epoch has gone, by an update: the pair is made anew in another, as in `_readmit`.
            self._attempts -= 1
            return [*dropped, CountReadmitted(), *self._start_attempt()]
        return [*dropped, *self._answer(error_reply(503, refusal.message))]

    # -- replies of engines ------------------------------------------------------------------------------

    def _prefill_answered(self, event: LegAnswered, now: float) -> list[Command]:
        leg = self.legs.live_leg(event.leg)
        result = read_prefill_reply(event.body) if 200 <= event.status < 300 else None
        if result is None or result.failed:
            return self._not_served(event, now)
        commands = self.legs.end("ok", now, cached_tokens=result.cached_tokens)
        in_time = self.legs.take_handoff(leg, result, now)
        if now >= self._deadline:
            return [*commands, *self._waited_too_long(TimeReached(), now)]
        if not in_time:
            return [*commands, *self._renew_handoff(leg.grant.epoch, now)]
        if result.handoff is None:
            commands.append(CountHandoff(outcome="missing"))
        return [*commands, *self._ask("asking_second", leg.grant.epoch)]

    def _handoff_expired(self, event: HandoffExpired, now: float) -> list[Command]:
        """The D leg was not sent in time. Its replica has seen nothing of it and is not blamed."""
        epoch = self.legs.live_leg(event.leg).grant.epoch
        return [*self.legs.end("expired", now), *self._renew_handoff(epoch, now)]

    def _decode_answered(self, event: LegAnswered, now: float) -> list[Command]:
        if not 200 <= event.status < 300 or reply_failed(event.body):
            return self._not_served(event, now)
        commands = self.legs.end("ok", now)
        self._budget.request_served()
        label = self.legs.making.label() if self._body.wants_label else None
        body = merge_reply(event.body, self.legs.prefill, label=label)
        return [*commands, *self._answer(Reply(status=event.status, body=body, content_type=event.content_type))]

    def _streaming(self, event: LegStreaming, now: float) -> list[Command]:
        replica = self.legs.live_leg(event.leg).grant.replica
        if self.state == "prefill" or failed_event(event.head):
            detail = "the engine answered with " + ("a stream" if self.state == "prefill" else "an error event")
            if not self._gate.may_close:
                return self._stop(502, f"{replica}: {detail}", now)
            closed = self.legs.close("engine_error", now, blamed=True)
            return [*closed, *self._try_again(replica, failed("engine_error", replica, detail), now)]
        making, begun = self.legs.making, self._stream.begun
        relay = self._stream.open(self.legs.prefill, making.label if self._body.wants_label else None)
        making.delivered()
        self.state = "relaying"
        if begun:
            return [ContinueRelay(leg=event.leg, first=relay.feed(event.head), merge=relay)]
        return [
            StartRelay(
                leg=event.leg,
                replica=replica,
                headers=making.headers(),
                content_type=event.content_type,
                first=relay.feed(event.head),
                merge=relay,
            )
        ]

    def _stream_ended(self, event: StreamEnded, now: float) -> list[Command]:
        self.legs.live_leg(event.leg)
        relay = self._stream.relay
        assert relay is not None, "relaying without a relay"
        if relay.broken is not None:
            return self._stream_broke(LegFailed(leg=event.leg, failure="broken", detail=relay.broken), now)
        if relay.engine_failed:
            ended = self.legs.end("engine_error", now, blamed=True)
        else:
            ended = self.legs.end("ok", now)
            self._budget.request_served()
        return [*ended, EndRelay(last=relay.flush()), self._leave()]

    # -- failures ----------------------------------------------------------------------------------------

    def _leg_failed(self, event: LegFailed, now: float) -> list[Command]:
        replica = self.legs.live_leg(event.leg).grant.replica
        ended = self.legs.end(event.failure, now, blamed=True)
        return [*ended, *self._try_again(replica, failed(event.failure, replica, event.detail), now)]

    def _stream_broke(self, event: LegFailed, now: float) -> list[Command]:
        """The client has seen bytes: it is told inside its stream, where OpenAI clients look for errors."""
        leg = self.legs.live_leg(event.leg)
        message = f"{leg.grant.replica} stopped in the middle of its reply: {event.detail}"
        last = error_event(FAILURE_STATUS[event.failure], message)
        return [*self.legs.end(event.failure, now, blamed=True), EndRelay(last=last), self._leave()]

    def _not_served(self, event: LegAnswered, now: float) -> list[Command]:
        """A reply that is no success: the client's mistake, or the engine's failure."""
        replica = self.legs.live_leg(event.leg).grant.replica
        if 400 <= event.status < 500:
            return [*self.legs.end("client_error", now), *self._answer(passed_on(event))]
        ended = self.legs.end("engine_error", now, blamed=True)
        return [*ended, *self._try_again(replica, unserved(event, replica), now)]

    # -- time, clients, updates --------------------------------------------------------------------------

    def _rested(self, _event: TimeReached, now: float) -> list[Command]:
        return self._start_attempt() if now < self._deadline else self._waited_too_long(_event, now)

    def _waited_too_long(self, _event: TimeReached, _now: float) -> list[Command]:
        return [*self.legs.drop_handoff(), *self._answer(error_reply(504, self._time_message()))]

    def _leg_too_slow(self, _event: TimeReached, now: float) -> list[Command]:
        replica = self.legs.live_leg().grant.replica
        if now >= self._deadline:
            return self._stop(504, f"{replica}: {self._time_message()}", now)
        if not self._gate.may_close:
            # Nothing is closed now; soon it may be.
            return [Pause(until=min(self._deadline, now + _LOOK_AGAIN_S))]
        detail = f"no answer within {self._rules.leg_timeout_s or 0:g} s"
        closed = self.legs.close("timeout", now, blamed=True)
        return [*closed, *self._try_again(replica, failed("timeout", replica, detail), now)]

    def _client_gone(self, _event: ClientGone, now: float) -> list[Command]:
        stopped = self.legs.stop("cancelled", now, may_close=self._gate.may_close)
        return [CountClientGone(), *stopped, *self._left()]

    def _interrupted(self, event: Interrupted, now: float) -> list[Command]:
        """Someone other than the client ends the request, or has it run again under the next weights."""
        if event.how == "asked":
            return self._stop(ABORTED_STATUS, ASKED_TO_END, now)
        if event.how == "shutdown":
            return self._stop(503, SHUTTING_DOWN, now)
        if event.how == "keep":
            # Between its legs as well: the second one may still be sent before the engines pause.
            self.legs.making.kept |= self.legs.live is not None or self.state == "asking_second"
            return []
        if self.legs.live is None and self.state != "asking_second":
            return []  # nothing is made of it yet: the line holds it
        if event.how == "readmit":
            return self._readmit(now)
        return self._stop(503, INTERRUPTED, now)

    def _unparked(self, event: Event, now: float) -> list[Command]:
        """What was left running while the gate was frozen is over, or may be closed now."""
        ended = self.legs.close("cancelled", now) if isinstance(event, Thawed) else self.legs.end("cancelled", now)
        return [*ended, self._leave()]

    def _ignore(self, _event: Event, _now: float) -> list[Command]:
        return []


_ANSWERS = (Grant, Refusal)
_PARKED: State = "parked"
_OVER: tuple[State, ...] = (_PARKED, "done")
_LIVE: tuple[State, ...] = ("asking", "prefill", "asking_second", "decode", "relaying", "resting")
_TRANSITIONS: dict[tuple[State, type[Event]], Callable[[Flow, Any, float], list[Command]]] = {
    ("new", Arrived): Flow._arrived,
    ("asking", Grant): Flow._first_granted,
    ("asking", Refusal): Flow._refused,
    ("asking", TimeReached): Flow._waited_too_long,
    ("prefill", LegAnswered): Flow._prefill_answered,
    ("prefill", LegStreaming): Flow._streaming,
    ("prefill", LegFailed): Flow._leg_failed,
    ("prefill", TimeReached): Flow._leg_too_slow,
    ("asking_second", Grant): Flow._second_granted,
    ("asking_second", Refusal): Flow._refused,
    ("asking_second", TimeReached): Flow._waited_too_long,
    ("decode", LegAnswered): Flow._decode_answered,
    ("decode", LegStreaming): Flow._streaming,
    ("decode", LegFailed): Flow._leg_failed,
    ("decode", HandoffExpired): Flow._handoff_expired,
    ("decode", TimeReached): Flow._leg_too_slow,
    ("relaying", StreamEnded): Flow._stream_ended,
    ("relaying", LegFailed): Flow._stream_broke,
    ("relaying", TimeReached): Flow._leg_too_slow,
    ("resting", TimeReached): Flow._rested,
    **{(_PARKED, end): Flow._unparked for end in (LegAnswered, LegFailed, HandoffExpired, StreamEnded, Thawed)},
    **{(state, ClientGone): Flow._client_gone for state in _LIVE},
    **{(state, Interrupted): Flow._interrupted for state in _LIVE},
    **{(state, late): Flow._ignore for state in _OVER for late in (ClientGone, Interrupted)},
}
