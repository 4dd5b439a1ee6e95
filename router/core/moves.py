"""The moves of a request: what `flow.py` does once it knows what happened.

Asking for a replica, trying again, going on under the next weights, the last word to the client. Each move leaves the
request in the state that the next event has to find.
"""

from __future__ import annotations

from typing import Literal

from router.core.asks import Ask, Grant, LegEnd
from router.core.client_stream import ClientStream
from router.core.commands import (
    Answer,
    AskReplica,
    Command,
    CountHandoff,
    CountReadmitted,
    CountRetry,
    EndLeg,
    EndRelay,
    Leave,
    Pause,
)
from router.core.continuation import CannotContinue, Continuation, Ended
from router.core.events import Arrived
from router.core.failures import INTERRUPTED, as_event
from router.core.legs import Legs
from router.core.replies import Reply, error_event, error_reply
from router.core.retry import backoff_s
from router.core.rules import FlowTools
from router.core.split import ClientBody

State = Literal["new", "asking", "prefill", "asking_second", "decode", "relaying", "resting", "parked", "done"]

_BYTES_PER_TOKEN = 4


class Moves:
    """A request between two events: its state, its legs, its stream."""

    def __init__(self, tools: FlowTools) -> None:
        self.state: State = "new"
        self.client_request_id: str | None = None
        """The id in the client's body, known after `Arrived`."""
        self._tools = tools
        self._gate, self._budget, self._rules = tools.gate, tools.budget, tools.rules
        self._deadline = 0.0
        self._attempts = self._retries = self._asks = 0
        self._avoid: frozenset[str] = frozenset()
        self._story: list[State] = []
        self._session: str | None = None
        self._arrival: Arrived
        self._body: ClientBody
        self._stream: ClientStream
        self.legs: Legs
        """These four are there from the arrival on."""

    # -- towards the dispatcher ----------------------------------------------------------------------------

    def _start_attempt(self) -> list[Command]:
        self._attempts += 1
        self.legs.begin_attempt()
        return self._ask("asking", None)

    def _ask(self, state: State, handoff_epoch: int | None) -> list[Command]:
        assert self.legs.live is None, "asking beside a live leg"
        self.state = state
        self._asks += 1
        ask = Ask(
            request=self._arrival.number,
            place=(self._arrival.sample_of or self._arrival).number,
            serial=self._asks,
            session=self._session,
            session_lasts=self._body.session_id is not None,
            tokens=self._body.size // _BYTES_PER_TOKEN + 1,
            avoid=self._avoid,
            handoff_epoch=handoff_epoch,
            min_version=self._arrival.min_version,
        )
        return [AskReplica(ask=ask, until=self._deadline)]

    def _back_in_line(self, grant: Grant, handoff_epoch: int | None) -> list[Command]:
        """The gate has closed while the answer was on its way."""
        end = EndLeg(LegEnd(grant.ticket, "cancelled"))
        return [end, *self._ask(self.state, handoff_epoch)]

    def _renew_handoff(self, epoch: int, now: float) -> list[Command]:
        """In place of a handoff that is too old: a fresh attempt, or a D leg that runs the prompt itself."""
        self.legs.forget_handoff()
        expired = CountHandoff(outcome="expired")
        if self._attempts <= self._rules.retries and now < self._deadline:
            return [expired, CountRetry(), *self._start_attempt()]
        return [expired, *self._ask("asking_second", epoch)]

    def _try_again(self, replica: str, reply: Reply, now: float) -> list[Command]:
        """Run a fresh attempt while that is allowed, else give this reply."""
        self._avoid |= {replica}
        if self._attempts > self._rules.retries or now >= self._deadline or not self._budget.take():
            return self._answer(reply)
        self.state = "resting"
        pause_s = backoff_s(self._rules.retry_backoff_s, self._retries, self._arrival.number)
        self._retries += 1
        return [CountRetry(), Pause(until=min(self._deadline, now + pause_s))]

    def _readmit(self, now: float) -> list[Command]:
        """End the leg and run the request again under the next weights; a stream goes on where it is."""
        leg = self.legs.live
        ended = self.legs.stop("cancelled", now, may_close=True)
        if self.state == "relaying":
            assert leg is not None, "relaying without a leg"
            label = self.legs.making.label() if self._body.wants_label else None
            match self._stream.go_on(leg.grant.version, label):
                case CannotContinue(reason=reason):
                    return [*ended, EndRelay(last=error_event(503, f"{INTERRUPTED} ({reason})")), self._leave()]
                case Ended(last=last):
                    return [*ended, EndRelay(last=last), self._leave()]
                case Continuation() as continuation:
                    self.legs.go_on(continuation)
        self._attempts -= 1  # an update is nobody's failure
        return [*ended, CountReadmitted(), *self._start_attempt()]

    # -- towards the client --------------------------------------------------------------------------------

    def _stop(self, status: int, message: str, now: float) -> list[Command]:
        """End the request with an error, wherever it is."""
        leg, late = self.legs.live, status == 504
        blamed = late and leg is not None and now - leg.sent_at >= self._rules.request_timeout_s / 2
        ended = self.legs.stop("timeout" if late else "cancelled", now, may_close=self._gate.may_close, blamed=blamed)
        return [*ended, self._last_word(error_reply(status, message)), *self._left()]

    def _answer(self, reply: Reply) -> list[Command]:
        return [self._last_word(reply), self._leave()]

    def _last_word(self, reply: Reply) -> Command:
        """The reply, in the form that the client can still take."""
        if self._stream.begun:
            return EndRelay(last=as_event(reply))
        headers = (*reply.headers, *self.legs.making.headers())
        return Answer(
            reply=Reply(status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers)
        )

    def _leave(self) -> Leave:
        assert self.legs.live is None, "leaving a live leg behind"
        self.state = "done"
        return Leave(request=self._arrival.number)

    def _left(self) -> list[Command]:
        """The client has its end; the request stays as long as its parked leg."""
        if self.legs.live is None:
            return [self._leave()]
        self.state = "parked"
        return []

    def _time_message(self) -> str:
        return f"no whole answer within {self._rules.request_timeout_s:g} s"
