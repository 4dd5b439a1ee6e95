"""The HTTP client towards the engines.

`exchange.py` sends legs through it, `poller.py` probes, `server.py` asks for the model list. Whatever goes wrong on
the way comes back as an event or a status, never as an exception. `core/fleet.py` tells it which replicas are lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Self, TypeVar

import aiohttp

from router.core.commands import SendLeg
from router.core.events import HandoffExpired, LegAnswered, LegFailed, LegStreaming
from router.core.fleet import ReplicaLost
from router.core.replies import Reply
from router.core.table import ProbeFailure
from router.io.sockets import open_socket
from router.settings import RouterSettings

_EVENT_STREAM = "text/event-stream"
_READ_SIZE = 256 * 1024
_Outcome = TypeVar("_Outcome")


class _TooLateToSendError(Exception):
    """A connection is there, and the moment until which the leg may be sent has passed."""


class Leg:
    """One request on its way to an engine."""

    def __init__(
        self, session: aiohttp.ClientSession, command: SendLeg, connect_timeout_s: float, alive: set[Leg]
    ) -> None:
        self._session = session
        self._command = command
        self._connect_timeout_s = connect_timeout_s
        self._alive = alive
        self._alive.add(self)
        self._starting = asyncio.timeout(None)
        self._started = False
        self._lost = False
        self._response: aiohttp.ClientResponse | None = None

    async def start(self, headers: dict[str, str]) -> LegAnswered | LegStreaming | LegFailed | HandoffExpired:
        """Send it; the whole reply, or the first line of a stream."""
        number, send_by = self._command.leg, self._command.send_by
        left_s = send_by - time.monotonic() if send_by is not None else None
        if left_s is not None and left_s <= 0:
            return self._over(HandoffExpired(leg=number))
        try:
            async with self._starting:
                answer = await self._send(headers, self._timeout(left_s))
        except _TooLateToSendError:
            return self._over(HandoffExpired(leg=number))
        except aiohttp.ConnectionTimeoutError as error:
            # The shorter of two limits ended it: what was left for sending, or the time that connecting may take.
            if not self._lost and left_s is not None and left_s < self._connect_timeout_s:
                return self._over(HandoffExpired(leg=number))
            return self._failed(error)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._failed(error)
        self._started = True
        return answer if isinstance(answer, LegStreaming) else self._over(answer)

    async def next_chunk(self) -> bytes | LegFailed:
        """What has arrived since; empty at the end of the stream."""
        assert self._response is not None, "a chunk of a leg that has not started"
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._failed(error)
        return chunk or self._over(chunk)

    def lose(self, lost: ReplicaLost) -> None:
        """End the leg as one whose engine can't be reached, unless it is a stream that still flows."""
        if self._lost or (self._started and not lost.silent):
            return
        self._lost = True
        if self._started:
            self.close()
        else:
            self._starting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Close the connection if the reply is not over; the engine sees its client leave."""
        self._alive.discard(self)
        if self._response is not None:
            self._response.close()

    async def _send(
        self, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> LegAnswered | LegStreaming | LegFailed:
        command = self._command
        self._response = response = await self._session.post(
            command.url,
            data=command.body,
            headers={"Content-Type": "application/json", "X-Request-Id": command.request_id, **headers},
            allow_redirects=False,
            timeout=timeout,
            trace_request_ctx=command.send_by,
        )
        content_type = response.headers.get("Content-Type", "application/octet-stream")
        if response.status == 200 and content_type.startswith(_EVENT_STREAM):
            head = await self._first_line(response)
            if not head:
                return LegFailed(leg=command.leg, failure="broken", detail="the stream ended before its first line")
            return LegStreaming(leg=command.leg, head=head, content_type=content_type)
        body = await response.read()
        return LegAnswered(leg=command.leg, status=response.status, body=body, content_type=content_type)

    def _timeout(self, left_s: float | None) -> aiohttp.ClientTimeout:
        """`connect` also covers name look-up and the wait for a connection of the pool."""
        total_s, connect_s = self._command.timeout_s, self._connect_timeout_s
        if left_s is None:
            return aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s)
        return aiohttp.ClientTimeout(
            total=total_s,
            connect=left_s,
            sock_connect=min(connect_s, left_s),
            # Longer limits would be rounded up to a whole second.
            ceil_threshold=math.inf,
        )

    def _over(self, outcome: _Outcome) -> _Outcome:
        self._alive.discard(self)
        return outcome

    async def _first_line(self, response: aiohttp.ClientResponse) -> bytes:
        head = b""
        while b"\n" not in head:
            chunk = await response.content.readany()
            if not chunk:
                break
            head += chunk
        return head

    def _failed(self, error: Exception) -> LegFailed:
        self.close()
        leg, detail = self._command.leg, str(error) or type(error).__name__
        if self._lost:
            return LegFailed(leg=leg, failure="unreachable", detail="it was taken out of use")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return LegFailed(leg=leg, failure="unreachable", detail="no connection")
        if isinstance(error, TimeoutError):
            return LegFailed(leg=leg, failure="timeout", detail=f"no answer within {self._command.timeout_s:g} s")
        return LegFailed(leg=leg, failure="broken", detail=detail)


class Upstream:
    """The pool of connections to all engines."""

    def __init__(self, settings: RouterSettings) -> None:
        self._connect_timeout_s = settings.connect_timeout_s
        self._alive: defaultdict[str, set[Leg]] = defaultdict(set)
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(_refuse_late)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_s, socket_factory=open_socket),
            trace_configs=[tracing],
            cookie_jar=aiohttp.DummyCookieJar(),
            # A compressed stream could not be relayed event by event.
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("User-Agent",),
            read_bufsize=_READ_SIZE,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def leg(self, command: SendLeg) -> Leg:
        return Leg(self._session, command, self._connect_timeout_s, self._alive[command.replica])

    def end_legs(self, lost: ReplicaLost) -> None:
        """End the legs that a lost replica holds; their flows go on at once."""
        for leg in tuple(self._alive[lost.replica]):
            leg.lose(lost)

    async def probe(self, url: str, timeout_s: float) -> ProbeFailure | None:
        """None if `GET url` answers 200 in time."""
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                await response.read()
                return None if response.status == 200 else "refused"
        except TimeoutError:
            return "slow"
        except (aiohttp.ClientError, OSError):
            return "refused"

    async def get(self, url: str, timeout_s: float) -> Reply | None:
        """A whole reply below 500; None if the engine has none to give."""
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                body = await response.read()
                content_type = response.headers.get("Content-Type", "application/octet-stream")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        return Reply(status=response.status, body=body, content_type=content_type) if response.status < 500 else None


async def _refuse_late(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _sent: aiohttp.TraceRequestHeadersSentParams
) -> None:
    """Called with a connection in hand, before the first byte is written: what is refused here reaches no engine."""
    send_by: float | None = context.trace_request_ctx
    if send_by is not None and time.monotonic() > send_by:
        raise _TooLateToSendError
