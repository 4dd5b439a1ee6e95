"""The HTTP client towards the engines.

`exchange.py` sends legs through it, `poller.py` probes, `server.py` asks for the model list. Whatever goes wrong on
the way comes back as an event or a status, never as an exception.
"""

from __future__ import annotations

from typing import Self

import aiohttp

from router.core.commands import SendLeg
from router.core.events import LegAnswered, LegFailed, LegStreaming
from router.core.replies import Reply
from router.core.table import ProbeFailure
from router.settings import RouterSettings

_EVENT_STREAM = "text/event-stream"
_READ_SIZE = 256 * 1024


class Leg:
    """One request on its way to an engine."""

    def __init__(self, session: aiohttp.ClientSession, command: SendLeg, connect_timeout_s: float) -> None:
        self._session = session
        self._command = command
        self._timeout = aiohttp.ClientTimeout(total=command.timeout_s, sock_connect=connect_timeout_s)
        self._response: aiohttp.ClientResponse | None = None

    async def start(self, headers: dict[str, str]) -> LegAnswered | LegStreaming | LegFailed:
        """Send it; the whole reply, or the first line of a stream."""
        command = self._command
        try:
            self._response = response = await self._session.post(
                command.url,
                data=command.body,
                headers={"Content-Type": "application/json", "X-Request-Id": command.request_id, **headers},
                allow_redirects=False,
                timeout=self._timeout,
            )
            content_type = response.headers.get("Content-Type", "application/octet-stream")
            if response.status == 200 and content_type.startswith(_EVENT_STREAM):
                head = await self._first_line(response)
                if not head:
                    return LegFailed(leg=command.leg, failure="broken", detail="the stream ended before its first line")
                return LegStreaming(leg=command.leg, head=head, content_type=content_type)
            body = await response.read()
            return LegAnswered(leg=command.leg, status=response.status, body=body, content_type=content_type)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.close()
            return self._failed(error)

    async def next_chunk(self) -> bytes | LegFailed:
        """What has arrived since; empty at the end of the stream."""
        assert self._response is not None, "a chunk of a leg that has not started"
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.close()
            return self._failed(error)

    def close(self) -> None:
        """Close the connection if the reply is not over; the engine sees its client leave."""
        if self._response is not None:
            self._response.close()

    async def _first_line(self, response: aiohttp.ClientResponse) -> bytes:
        head = b""
        while b"\n" not in head:
            chunk = await response.content.readany()
            if not chunk:
                break
            head += chunk
        return head

    def _failed(self, error: Exception) -> LegFailed:
        leg, detail = self._command.leg, str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return LegFailed(leg=leg, failure="unreachable", detail="no connection")
        if isinstance(error, TimeoutError):
            return LegFailed(leg=leg, failure="timeout", detail=f"no answer within {self._command.timeout_s:g} s")
        return LegFailed(leg=leg, failure="broken", detail=detail)


class Upstream:
    """The pool of connections to all engines."""

    def __init__(self, settings: RouterSettings) -> None:
        self._connect_timeout_s = settings.connect_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_s),
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
        return Leg(self._session, command, self._connect_timeout_s)

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
