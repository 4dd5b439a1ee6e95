"""The client side: calls to engines over a pool of connections, no task per call on a connection that is there.

`send` takes the connection that was used last, or opens one; a connection (`engine_connection.py`) carries one call at
a time and comes back here when its reply has ended cleanly.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from router.io.http1.engine_connection import CallListener, EngineConnection, Failure
from router.io.http1.outbox import Outbox

__all__ = ["Call", "CallListener", "Failure", "HttpClient", "OpenSocket", "Target", "split_url"]

_log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_ADDRESS_TTL_S = 10.0
_FIT_FOR_A_LINE = re.compile(r"[!-~]+")
_OWN_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))

Origin = tuple[str, int]
_Addresses = list[tuple[Any, ...]]
OpenSocket = Callable[[tuple[Any, ...]], socket.socket]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a call goes."""

    origin: Origin
    path: bytes
    """With the query."""
    host: bytes
    """As the Host header has it."""


@functools.lru_cache(maxsize=4096)
def split_url(url: str) -> Target:
    """An absolute http URL as the client needs it."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or "@" in parts.netloc or not _FIT_FOR_A_LINE.fullmatch(url):
        raise ValueError(f"not a plain http URL: {url!r}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(origin=(parts.hostname, parts.port or 80), path=path.encode(), host=parts.netloc.encode())


class Call(msgspec.Struct, eq=False):
    """One request to an engine."""

    _client: HttpClient
    _target: Target
    _head: bytes
    _body: bytes
    listener: CallListener
    send_by: float | None
    _connection: EngineConnection | None = None
    _opening: asyncio.Task[None] | None = None
    _over: bool = False
    _paused: bool = False
    _reused: bool = False
    _sent: bool = False

    def __repr__(self) -> str:
        """Without the token in the head and the client's body."""
        return f"<Call to {self._target.origin}>"

    @property
    def sent(self) -> bool:
        """The kernel has taken all bytes of the request."""
        return self._sent if self._connection is None else not self._connection.unsent

    def close(self) -> None:
        """Give the call up. An engine that has it sees its client leave."""
        if self._over:
            return
        if self._opening is not None:
            self._opening.cancel()
        connection = self._finish()
        if connection is not None:
            connection.let_go()

    def pause(self) -> None:
        """Read nothing more until `resume`."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    # From the client

    def begin(self) -> None:
        """Send over an idle connection, or open one."""
        if self.send_by is not None and self._late():
            self._client.loop.call_soon(self.fail, "late", "the moment until which it may be sent has passed")
            return
        connection = self._client.take_idle(self._target.origin)
        if connection is None:
            self._open()
        else:
            self._reused = True
            self._send_over(connection)

    def opened(self, connection: EngineConnection) -> None:
        """A fresh connection is in hand."""
        self._opening = None
        if self._over:
            self._client.released(connection)
        elif self._late():
            self._client.released(connection)
            self.fail("late", "the connection came after the moment until which it may be sent")
        else:
            self._reused = False
            self._send_over(connection)

    def fail(self, failure: Failure, detail: str) -> None:
        if self._over:
            return
        listener = self.listener
        self._finish()
        try:
            listener.failed(failure, detail)
        except Exception:
            _log.exception("a listener failed on the failure of its call")

    # From the connection

    def connection_done(self) -> None:
        self._finish()

    def connection_broke(self, detail: str, *, answered: bool) -> None:
        self._detach()
        if self._reused and not answered and not self._client.closed:
            # Most likely the engine closed the idle connection while the request was on its way (A16).
            self._sent = False
            self._open()
        else:
            self.fail("broken", detail)

    # Inside

    def _open(self) -> None:
        self._opening = self._client.open_for(self, self._target.origin)

    def _send_over(self, connection: EngineConnection) -> None:
        self._connection = connection
        connection.carry(self, self._head, self._body)
        if self._paused:
            connection.pause()

    def _late(self) -> bool:
        return self.send_by is not None and time.monotonic() > self.send_by

    def _finish(self) -> EngineConnection | None:
        self._over = True
        self._opening = None
        self._body = b""
        # It most likely refers to this call.
        del self.listener
        return self._detach()

    def _detach(self) -> EngineConnection | None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._sent = not connection.unsent
        return connection


class HttpClient:
    """The pool."""

    def __init__(self, *, keepalive_s: float, connect_timeout_s: float, open_socket: OpenSocket) -> None:
        self.loop = asyncio.get_running_loop()
        self._outbox = Outbox(self.loop.call_soon)
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._open_socket = open_socket
        self._connections: set[EngineConnection] = set()
        # Of each origin the connection that was used last is the last one.
        self._idle: dict[Origin, dict[EngineConnection, None]] = {}
        self._addresses: dict[Origin, tuple[float, _Addresses]] = {}
        self._opening: dict[asyncio.Task[None], Call] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._all_lost = asyncio.Event()
        self.closed = False

    def send(
        self,
        url: str | Target,
        method: str,
        head: bytes,
        body: bytes,
        listener: CallListener,
        *,
        send_by: float | None = None,
    ) -> Call:
        """Send a request. `head` are whole header lines; Host and Content-Length are added to them."""
        assert not self.closed, "a call after the end"
        assert method not in ("HEAD", "CONNECT"), "replies to these are framed in another way"
        target = split_url(url) if isinstance(url, str) else url
        length = b"Content-Length: %d\r\n" % len(body) if body or method != "GET" else b""
        start = b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b\r\n" % (method.encode(), target.path, target.host, length, head)
        call = Call(self, target, start, body, listener, send_by)
        call.begin()
        return call

    async def close(self) -> None:
        """Close all connections; calls that are open fail."""
        self.closed = True
        self._all_lost.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
        opening = dict(self._opening)
        for task, call in opening.items():
            task.cancel()
            call.fail("broken", "the client was closed")
        for connection in tuple(self._connections):
            connection.end("the client was closed")
        if opening:
            await asyncio.wait(opening)
        if self._connections:
            await self._all_lost.wait()

    # From calls

    def take_idle(self, origin: Origin) -> EngineConnection | None:
        """The connection to this origin that was used last, if it may still be used."""
        idle = self._idle.get(origin)
        oldest = self.loop.time() - self._keepalive_s
        while idle:
            connection, _ = idle.popitem()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    def open_for(self, call: Call, origin: Origin) -> asyncio.Task[None]:
        task = self.loop.create_task(self._open_for(call, origin))
        self._opening[task] = call
        task.add_done_callback(self._opening.pop)
        return task

    # From connections

    def released(self, connection: EngineConnection) -> None:
        if self.closed:
            connection.transport.abort()
            return
        connection.idle_since = self.loop.time()
        idle = self._idle.get(connection.origin)
        if idle is None:
            idle = self._idle[connection.origin] = {}
        idle[connection] = None
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    def lost(self, connection: EngineConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_lost.set()
        idle = self._idle.get(connection.origin)
        if idle is not None:
            idle.pop(connection, None)

    # Inside

    async def _open_for(self, call: Call, origin: Origin) -> None:
        limit_s = self._connect_timeout_s
        on_timeout: Failure = "unreachable"
        if call.send_by is not None and (left_s := call.send_by - time.monotonic()) < limit_s:
            limit_s, on_timeout = left_s, "late"
        try:
            async with asyncio.timeout(limit_s) as limit:
                connection = await self._connect(origin)
        except (OSError, UnicodeError) as error:
            if limit.expired():
                call.fail(on_timeout, f"no connection within {limit_s:.3g} s")
            else:
                call.fail("local" if _is_own_shortage(error) else "unreachable", f"no connection: {error}")
        except Exception:
            _log.exception("connecting to %s port %d failed", *origin)
            call.fail("unreachable", "no connection: the router failed on it; its log has the reason")
        else:
            call.opened(connection)

    async def _connect(self, origin: Origin) -> EngineConnection:
        error: OSError | None = None
        for address in await self._resolve(origin):
            try:
                return await self._connect_to(address, origin)
            except OSError as failed:
                # Where one address refuses and this machine has nothing to reach the other with, the engine is down.
                if error is None or _is_own_shortage(error):
                    error = failed
        raise error or OSError(f"{origin[0]} has no address")

    async def _connect_to(self, address: tuple[Any, ...], origin: Origin) -> EngineConnection:
        made = self._open_socket(address)
        try:
            made.setblocking(False)
            await self.loop.sock_connect(made, address[4])
            _, connection = await self.loop.create_connection(
                lambda: EngineConnection(self, origin, self._outbox), sock=made
            )
        except BaseException:
            made.close()
            raise
        if connection.transport.is_closing():
            raise ConnectionResetError("the engine closed the connection at once")
        self._connections.add(connection)
        return connection

    async def _resolve(self, origin: Origin) -> _Addresses:
        host, port = origin
        found_at, addresses = self._addresses.get(origin, (0.0, []))
        if addresses and self.loop.time() - found_at < _ADDRESS_TTL_S:
            return addresses
        try:
            # Of an address this needs neither a thread nor the network.
            numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            addresses = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric))
        except socket.gaierror:
            addresses = list(await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        self._addresses[origin] = (self.loop.time(), addresses)
        return addresses

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        oldest = self.loop.time() - self._keepalive_s
        for origin, idle in tuple(self._idle.items()):
            for connection in tuple(idle):
                if connection.idle_since >= oldest:
                    break
                del idle[connection]
                connection.transport.abort()
            if not idle:
                del self._idle[origin]
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep) if self._idle else None


def _is_own_shortage(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _OWN_SHORTAGES
