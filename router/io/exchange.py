"""One client request as a conversation between its socket, its `Flow`, the dispatcher and the engines.

`public.py` makes one per request, `gathering.py` one per sample. It turns what happens into events, carries the flow's
commands out and decides nothing. All of it is callbacks: a request costs no task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.core.asks import Grant, LegEnd, Refusal
from router.core.client_stream import Relay
from router.core.commands import (
    Answer,
    AskReplica,
    CancelLeg,
    Command,
    ContinueRelay,
    EndLeg,
    EndRelay,
    GatherSamples,
    Leave,
    ParkLeg,
    Pause,
    SendLeg,
    StartRelay,
)
from router.core.events import (
    Arrived,
    ClientGone,
    Event,
    HandoffExpired,
    LegAnswered,
    LegFailed,
    StreamEnded,
    TimeReached,
)
from router.core.flow import Flow
from router.core.replies import error_event, error_reply
from router.core.rules import FlowTools
from router.io.alarms import Alarms
from router.io.desk import ExchangeDesk
from router.io.gathering import Gathering
from router.io.leg import Leg
from router.io.metrics import Metrics
from router.io.upstream import Upstream

_log = logging.getLogger(__name__)

_OUR_MISTAKE = "the router failed on this request; its log has the reason"
_MAX_ECHO = 256
CLIENT_GONE = 499
"""The status that is counted for a request whose client left."""


class Client(Protocol):
    """Where a reply goes: a connection, or what joins the samples of one request."""

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...
    def start(self, status: int, headers: list[tuple[str, str]]) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    @property
    def writable(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class ExchangeTools:
    """What every exchange needs."""

    desk: ExchangeDesk
    upstream: Upstream
    metrics: Metrics
    flow: FlowTools
    loop: asyncio.AbstractEventLoop
    alarms: Alarms
    numbers: Iterator[int]
    """Request numbers, in the order of arrival."""
    tell_bytes_every_s: float
    """How often a stream tells that its replica is sending: well within the time after which one counts as silent."""


class Exchange:
    """See the module text."""

    def __init__(
        self, client: Client, request: Arrived, tools: ExchangeTools, arrived_at: float, *, counted: bool = True
    ) -> None:
        """It begins when `request` is fed to it. `counted`: False for one sample of a request, which is counted as a
        whole."""
        self.request = request
        self.flow = Flow(tools.flow)
        self.leg: Leg | None = None
        self._client = client
        self._tools = tools
        self._arrived_at = arrived_at
        self._counted = counted
        self._status = 0
        self._events: list[Event] = []
        self._busy = self._given_up = False
        """Busy: an event is being taken. One that has been given up takes none any more."""
        self._ticket: int | None = None
        """Of the grant that it holds."""
        self._merge: Relay | None = None
        self._deadline = 0.0
        self._seen_at = 0.0
        self._gathering: Gathering | None = None
        self.on_prefilled: Callable[[], None] | None = None
        """Called when the request has its prefill behind it."""

    @property
    def client_request_id(self) -> str | None:
        """The id by which the client knows this request."""
        return self.request.asked_id or self.flow.client_request_id

    # -- events --------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Take one event and carry out what follows from it; events that come meanwhile wait their turn."""
        if self._busy:
            self._events.append(event)
            return
        self._busy = True
        counted = self._tools.metrics.counted
        try:
            while True:
                for command in self.flow.step(event, time.monotonic()):
                    carry_out = _CARRY_OUT.get(type(command))
                    if carry_out is not None:
                        carry_out(self, command)
                    else:
                        counted[command] += 1
                if not self._events:
                    break
                event = self._events.pop(0)
        except Exception:
            self._give_up()
        finally:
            self._busy = self._given_up

    def decided(self, answer: Grant | Refusal) -> None:
        """The dispatcher has answered."""
        if isinstance(answer, Grant):
            self._ticket = answer.ticket
        self.feed(answer)

    def leg_over(self, event: LegAnswered | LegFailed | HandoffExpired | StreamEnded) -> None:
        # Its alarm stays: what the flow makes of the event sets it anew or clears it.
        leg, self.leg = self.leg, None
        if leg is not None:
            self._tools.upstream.forget(leg)
        self.feed(event)

    def relay(self, data: bytes) -> None:
        """Bytes of a stream that has begun: the path that every token takes."""
        assert self._merge is not None, "a relay that never began"
        assert self.leg is not None, "a relay without a leg"
        self._tell_sending(self.leg.command.replica)
        try:
            out = self._merge.feed(data)
        except Exception:
            self._give_up()
            return
        if out:
            self._client.write(out)
        if self._merge.broken is not None:
            self.leg.fail("broken", self._merge.broken)

    def client_gone(self) -> None:
        gathering = self._gathering
        self._done(CLIENT_GONE)
        if gathering is not None:
            gathering.client_gone()
        else:
            self.feed(ClientGone())

    def client_writable(self, writable: bool) -> None:
        """A slow reader stops the engine's stream instead of filling memory."""
        if self._gathering is not None:
            self._gathering.client_writable(writable)
        call = self.leg.call if self.leg is not None else None
        if call is not None and self._merge is not None:
            if writable:
                call.resume()
            else:
                call.pause()

    def time_reached(self) -> None:
        self.feed(TimeReached())

    def _give_up(self) -> None:
        """A mistake of ours must cost one request, not a replica's room or a client's patience."""
        _log.exception("request %s failed in state %s", self.request.request_key, self.flow.state)
        self._given_up = self._busy = True
        self._tools.alarms.clear(self)
        if self.leg is not None and self._tools.flow.gate.may_close:
            self._tools.upstream.forget(self.leg)
            self.leg.close()
        elif self.leg is not None:
            self.leg.park()
        if self._ticket is not None:
            self._tools.desk.end_leg(LegEnd(self._ticket, "cancelled"))
        self._tools.desk.leave(self.request.number)
        if self._merge is None:
            reply = error_reply(500, _OUR_MISTAKE)
            self.reply(reply.status, [("Content-Type", reply.content_type)], reply.body)
        else:
            self._client.write(error_event(500, _OUR_MISTAKE))
            self.end()

    # -- towards the client; a gathering uses them too -----------------------------------------------------

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self._gathering = None
        self._client.reply(status, headers, body)
        if self._counted:
            self._tools.metrics.replied(self.request.path, status, time.monotonic() - self._arrived_at)

    def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        self._status = status
        if self._counted:
            self._tools.metrics.first_byte(self.request.path, time.monotonic() - self._arrived_at)
        self._client.start(status, headers)

    def write(self, data: bytes) -> None:
        self._client.write(data)

    def end(self) -> None:
        self._client.end()
        self._done(self._status)

    @property
    def writable(self) -> bool:
        return self._client.writable

    def _done(self, status: int) -> None:
        self._gathering = None
        if self._counted:
            self._tools.metrics.request_done(self.request.path, status, time.monotonic() - self._arrived_at)

    # -- commands ------------------------------------------------------------------------------------------

    def _ask(self, command: AskReplica) -> None:
        answer = self._tools.desk.ask(command.ask, self)
        if answer is None:
            self._tools.alarms.set(self, command.until)
        else:
            self._ticket = answer.ticket if isinstance(answer, Grant) else None
            self._events.append(answer)

    def _send(self, command: SendLeg) -> None:
        self._deadline = command.deadline
        self.leg = leg = Leg(command, self)
        self._tools.alarms.set(self, command.until)
        self._tools.upstream.send(leg, self.request.forwarded)
        if command.role != "prefill" and self.on_prefilled is not None:
            self.on_prefilled()

    def _cancel(self, _command: CancelLeg) -> None:
        self._tools.alarms.clear(self)
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.close()
            self._tools.upstream.forget(leg)

    def _park(self, _command: ParkLeg) -> None:
        self._tools.alarms.clear(self)
        assert self.leg is not None, "no leg to park"
        self.leg.park()
        self._tools.desk.park(self)

    def _end_leg(self, command: EndLeg) -> None:
        if command.end.ticket == self._ticket:
            self._ticket = None
        self._tools.desk.end_leg(command.end)

    def _leave(self, command: Leave) -> None:
        self._tools.alarms.clear(self)
        self._tools.desk.leave(command.request)

    def _pause(self, command: Pause) -> None:
        self._tools.alarms.set(self, command.until)

    def _answer(self, command: Answer) -> None:
        reply = command.reply
        headers = [("Content-Type", reply.content_type), *reply.headers, ("x-request-id", self._echoed_id())]
        self.reply(reply.status, headers, reply.body)

    def _start_relay(self, command: StartRelay) -> None:
        self._merge = command.merge
        self._tell_sending(command.replica)
        self._tools.alarms.set(self, self._deadline)
        headers = [
            ("Content-Type", command.content_type),
            ("Cache-Control", "no-cache"),
            *command.headers,
            ("x-request-id", self._echoed_id()),
        ]
        self.start(200, headers)
        if command.first:
            self._client.write(command.first)
        if not self._client.writable:
            self.client_writable(False)

    def _continue_relay(self, command: ContinueRelay) -> None:
        self._merge = command.merge
        self._tools.alarms.set(self, self._deadline)
        if command.first:
            self._client.write(command.first)
        if not self._client.writable:
            self.client_writable(False)

    def _end_relay(self, command: EndRelay) -> None:
        if command.last:
            self._client.write(command.last)
        self.end()

    def _gather(self, command: GatherSamples) -> None:
        def begin(client: Client, request: Arrived) -> Exchange:
            return Exchange(client, request, self._tools, time.monotonic(), counted=False)

        # By the client's id the samples can be aborted.
        request = msgspec.structs.replace(self.request, asked_id=self.client_request_id)
        self._gathering = Gathering(self, request, self._tools, command, begin)
        self._gathering.start()

    # -- helpers -------------------------------------------------------------------------------------------

    def _tell_sending(self, replica: str) -> None:
        now = time.monotonic()
        if now - self._seen_at > self._tools.tell_bytes_every_s:
            self._seen_at = now
            self._tools.desk.byte_seen(replica)

    def _echoed_id(self) -> str:
        asked = self.client_request_id
        return asked if asked and _is_plain(asked) else self.request.request_key


_CARRY_OUT: dict[type[Command], Callable[[Exchange, Any], None]] = {
    AskReplica: Exchange._ask,
    SendLeg: Exchange._send,
    CancelLeg: Exchange._cancel,
    ParkLeg: Exchange._park,
    EndLeg: Exchange._end_leg,
    Leave: Exchange._leave,
    Pause: Exchange._pause,
    Answer: Exchange._answer,
    StartRelay: Exchange._start_relay,
    ContinueRelay: Exchange._continue_relay,
    EndRelay: Exchange._end_relay,
    GatherSamples: Exchange._gather,
}
"""What is not here is a count."""


def _is_plain(text: str) -> bool:
    """Fit for a header: what is not is never echoed."""
    return len(text) <= _MAX_ECHO and text.isascii() and text.isprintable()
