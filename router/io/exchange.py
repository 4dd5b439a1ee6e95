"""One client request as a conversation between its socket, its `Flow` and the engines.

`server.py` makes one per request. It turns what happens into events, carries the flow's commands out and decides
nothing. A client that leaves cancels the handler's task (aiohttp does so the moment the connection closes,
whether or not anything is being sent), and that becomes `ClientGone`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from router.core.commands import Answer, CancelLeg, Command, EndRelay, SendLeg, StartRelay
from router.core.events import Arrived, ClientGone, Event, LegFailed, StreamEnded
from router.core.fleet import Fleet
from router.core.flow import Flow
from router.core.replies import Reply
from router.io.metrics import Metrics
from router.io.upstream import Leg, Upstream

FORWARDED_HEADERS = ("traceparent", "tracestate")
"""Client headers that engines get too. Credentials and ids stay here."""
_MAX_ECHO = 256


@dataclass(frozen=True, kw_only=True)
class ExchangeTools:
    """What every exchange needs."""

    fleet: Fleet
    upstream: Upstream
    metrics: Metrics


class Exchange:
    """See the module text."""

    def __init__(self, request: web.Request, flow: Flow, tools: ExchangeTools, *, request_key: str) -> None:
        self._request = request
        self._flow = flow
        self._tools = tools
        self._key = request_key
        self._started = time.monotonic()
        self._leg: Leg | None = None
        self._response: web.StreamResponse | None = None
        self._headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}

    async def run(self, body: bytes, session_header: str | None) -> web.StreamResponse:
        """Serve the request; the finished response."""
        event: Event = Arrived(path=self._request.path, body=body, session_header=session_header, request_key=self._key)
        try:
            while True:
                outcome = await self._perform(self._flow.step(event, time.monotonic()))
                if isinstance(outcome, web.StreamResponse):
                    return outcome
                event = outcome
        except BaseException:
            # Whatever ends the handler early, the client gets nothing more: give back all that the request holds.
            self._leave()
            raise

    async def _perform(self, commands: Sequence[Command]) -> Event | web.StreamResponse:
        """Carry out the commands of one step, of which one says what happens next."""
        outcome: Event | web.StreamResponse | None = None
        for command in commands:
            match command:
                case SendLeg():
                    self._leg = self._tools.upstream.leg(command)
                    outcome = await self._leg.start(self._headers)
                case CancelLeg():
                    self._cancel_leg()
                case StartRelay():
                    outcome = await self._relay(command)
                case EndRelay(last=last):
                    outcome = await self._end_relay(last)
                case Answer(reply=reply):
                    outcome = self._answer(reply)
                case _:
                    self._tools.metrics.count(command)
        assert outcome is not None, "a step that leads nowhere"
        return outcome

    async def _relay(self, command: StartRelay) -> StreamEnded | LegFailed:
        assert self._leg is not None, "a relay without a leg"
        response = web.StreamResponse(headers=self._reply_headers(command.headers))
        response.headers["Content-Type"] = command.content_type
        response.headers["Cache-Control"] = "no-cache"
        self._response = response
        await response.prepare(self._request)
        self._first_byte()
        fleet, replica, feed = self._tools.fleet, command.replica, command.merge.feed
        chunk: bytes | LegFailed = command.first
        while isinstance(chunk, bytes):
            if chunk:
                await response.write(chunk)
            received = await self._leg.next_chunk()
            if received == b"":
                return StreamEnded(leg=command.leg)
            fleet.byte_seen(replica, time.monotonic())
            chunk = feed(received) if isinstance(received, bytes) else received
        return chunk

    async def _end_relay(self, last: bytes) -> web.StreamResponse:
        assert self._response is not None, "the end of a relay that never began"
        if last:
            await self._response.write(last)
        await self._response.write_eof()
        return self._response

    def _answer(self, reply: Reply) -> web.Response:
        response = to_response(reply)
        response.headers.update(self._reply_headers(()))
        if reply.status < 400:
            self._first_byte()
        return response

    def _reply_headers(self, headers: tuple[tuple[str, str], ...]) -> dict[str, str]:
        asked = self._request.headers.get("X-Request-Id") or self._flow.client_request_id
        return {**dict(headers), "x-request-id": asked if asked and _is_plain(asked) else self._key}

    def _first_byte(self) -> None:
        self._tools.metrics.first_byte(self._request.path, time.monotonic() - self._started)

    def _leave(self) -> None:
        for command in self._flow.step(ClientGone(), time.monotonic()):
            if isinstance(command, CancelLeg):
                self._cancel_leg()
            elif not isinstance(command, SendLeg | StartRelay | EndRelay | Answer):
                self._tools.metrics.count(command)

    def _cancel_leg(self) -> None:
        if self._leg is not None:
            self._leg.close()


def to_response(reply: Reply) -> web.Response:
    """A reply of the core as aiohttp writes it."""
    return web.Response(
        status=reply.status, body=reply.body, headers={"Content-Type": reply.content_type, **dict(reply.headers)}
    )


def _is_plain(text: str) -> bool:
    """Fit for a header: what is not is never echoed."""
    return len(text) <= _MAX_ECHO and text.isascii() and text.isprintable()
