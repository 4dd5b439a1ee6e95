"""The server side: connections of clients, one request at a time each, no task and no timer per request.

A connection gives its bytes to a `RequestReader` (`request_reader.py`), the request to the application, and a
`Responder` (`responder.py`) to answer with. The application is a plain function; what it returns hears of the client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from typing import Protocol, cast

from router.core.replies import error_reply
from router.io.http1.message import Limits, RefusedError, Request, date_line
from router.io.http1.outbox import Outbox
from router.io.http1.request_reader import RequestReader
from router.io.http1.responder import Responder

__all__ = ["Application", "Exchange", "HttpServer", "Limits", "Request", "Responder"]

_log = logging.getLogger(__name__)

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BACKLOG = 4096
_WRITE_AHEAD = 64 * 1024
"""More than this unsent, and the application is told to wait."""
_READ_AHEAD = 64 * 1024
"""So much is read while a request is open, because the end of a connection is only seen by reading."""
_LINGER_S = 5.0
_LINGER_BYTES = 16 * 1024 * 1024
"""A refused client is still sending. Closing with unread bytes would reset the connection and destroy the answer, so
that much is read and thrown away."""
_LAST_WORDS_S = 0.5
"""So long the answers to requests that were ended may take to reach their clients."""
_SWEEP_S = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""The kernel notices within two minutes that a client's machine is gone; a request may be open for hours."""


class Exchange(Protocol):
    """What the application hands back for a request that it has not answered yet.

    What happened before it was handed back is not told again: see `Responder.writable`.
    """

    def client_gone(self) -> None:
        """The client's connection closed before the reply ended. Called at most once, and never after the reply."""

    def client_writable(self, writable: bool) -> None:
        """The client reads more slowly than is written, or has caught up. May come from within `Responder.write`."""


Application = Callable[[Request, Responder], Exchange | None]
"""None: already answered, or nothing to tell."""
OnRefused = Callable[[int, str], None]
"""Hears status and reason of each request that the application never saw."""


class _Connection(asyncio.Protocol):
    """One client."""

    __slots__ = (
        "_exchange",
        "_held",
        "_lingering",
        "_open",
        "_reader",
        "_responder",
        "_unsent",
        "deadline",
        "server",
        "transport",
        "writable",
    )

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self._reader: RequestReader | None = None
        self._responder: Responder | None = None
        self._exchange: Exchange | None = None
        self._held = b""
        self._lingering = self._unsent = 0
        self._open = False
        self.writable = True
        self.deadline = math.inf

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_WRITE_AHEAD)
        self._open = True
        self.server.add(self)
        self._expire_in(self.server.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._lingering -= len(data)
            if self._lingering <= 0:
                self.transport.abort()
        elif self._responder is None and not self._held and self.writable:
            self._read(data)
        else:
            self._held += data
            if len(self._held) > _READ_AHEAD:
                self.transport.pause_reading()

    def eof_received(self) -> None:
        # A client that closes one direction counts as gone, as nginx and uvicorn have it. What it was answered before
        # still leaves.
        self._open = False
        self.server.outbox.flush(self.transport)
        if self._responder is not None:
            self._gone()
            self.transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self._open = False
        self._reader = None
        self._held = b""
        self._gone()
        self.server.remove(self)

    def pause_writing(self) -> None:
        self.writable = False
        self._await_reader()
        self._tell_writable()

    def resume_writing(self) -> None:
        self.writable = True
        if self._responder is not None:
            self.deadline = math.inf
        self._tell_writable()
        self._read_held_soon()

    # From the responder

    def send(self, data: bytes) -> None:
        self.server.outbox.write(self.transport, data)

    def reply_ended(self, *, keep_alive: bool) -> None:
        self._responder = self._exchange = None
        if keep_alive and not self.server.draining:
            self._expire_in(self.server.limits.idle_timeout_s)
            if self._held:
                self._read_held_soon()
        elif self._held or self._reader is not None:
            self._linger()
        else:
            self._close()

    def reply_aborted(self) -> None:
        self._responder = self._exchange = None
        # What the client has got until now may be a whole reply to an earlier request.
        self.server.outbox.flush(self.transport)
        self.abort()

    # From the server

    def expire(self) -> None:
        """The deadline has passed."""
        if self._lingering:
            self.abort()
        elif self._responder is not None or self.transport.is_closing():
            if self.transport.get_write_buffer_size() < self._unsent:
                self._await_reader()
            else:
                self.abort()
        elif self._reader is not None:
            part = "body" if self._reader.head_complete else "head"
            self._refuse(RefusedError(408, f"the {part} of the request did not arrive in time"))
        else:
            self._close()

    def close_if_idle(self) -> None:
        if self._reader is None and self._responder is None and not self._held and not self._lingering:
            self._close()

    def abort(self) -> None:
        self._open = False
        self.transport.abort()

    # Inside

    def _read(self, data: bytes) -> None:
        while data and self._open:
            reader = self._reader
            begins = reader is None
            if reader is None:
                reader = self._reader = RequestReader(self.server.limits)
            try:
                data = reader.feed(data)
            except RefusedError as refused:
                self._refuse(refused)
                return
            request = reader.request
            if request is None:
                if begins:
                    self._expire_in(self.server.limits.header_timeout_s)
                self._await_body(reader)
            else:
                self._reader = None
                self._serve(reader, request)
                if self._responder is not None or not self.writable:
                    self._held = data
                    return

    def _await_body(self, reader: RequestReader) -> None:
        if reader.head_complete:
            self._expire_in(self.server.limits.body_timeout_s)
            if reader.wants_continue:
                reader.wants_continue = False
                self.send(_CONTINUE)

    def _serve(self, reader: RequestReader, request: Request) -> None:
        self.deadline = math.inf
        responder = Responder(self, request.method, http10=reader.is_http10, keep_alive=reader.keep_alive)
        self._responder = responder
        try:
            exchange = self.server.application(request, responder)
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            if responder.started:
                responder.abort()
            else:
                self._answer(responder, 500, "the router failed on this request; its log has the reason")
        else:
            if self._responder is responder:
                self._exchange = exchange

    def _read_held_soon(self) -> None:
        """The caller may be the application, in the middle of something else."""
        if self._held and self._responder is None:
            self.server.loop.call_soon(self._read_held)

    def _read_held(self) -> None:
        if self._open and self._responder is None and self.writable:
            held, self._held = self._held, b""
            self._read(held)
            if self._open and len(self._held) <= _READ_AHEAD:
                self.transport.resume_reading()

    def _refuse(self, refused: RefusedError) -> None:
        self.server.on_refused(refused.status, refused.message)
        self._answer(Responder(self, "", http10=False, keep_alive=False), refused.status, refused.message)

    def _answer(self, responder: Responder, status: int, message: str) -> None:
        answer = error_reply(status, message)
        responder.reply(answer.status, (("Content-Type", answer.content_type),), answer.body)

    def _linger(self) -> None:
        """Say that nothing follows, and let the client read what it has got before the connection closes."""
        self._reader = None
        self._held = b""
        if self.transport.is_closing():
            return
        self._lingering = _LINGER_BYTES
        self._expire_in(_LINGER_S)
        self.server.outbox.flush(self.transport)
        self.transport.write_eof()
        self.transport.resume_reading()

    def _close(self) -> None:
        """Close once all is sent."""
        self._open = False
        self.server.outbox.flush(self.transport)
        self._await_reader()
        self.transport.close()

    def _await_reader(self) -> None:
        """A client that takes nothing of what is sent is cut off."""
        self._unsent = self.transport.get_write_buffer_size()
        self._expire_in(self.server.limits.idle_timeout_s)

    def _gone(self) -> None:
        responder, exchange = self._responder, self._exchange
        self._responder = self._exchange = None
        if responder is not None:
            responder.forget()
        if exchange is not None:
            try:
                exchange.client_gone()
            except Exception:
                _log.exception("an exchange failed on the end of its client")

    def _tell_writable(self) -> None:
        if self._exchange is not None:
            try:
                self._exchange.client_writable(self.writable)
            except Exception:
                _log.exception("an exchange failed on its client's pace")

    def _expire_in(self, delay_s: float) -> None:
        self.deadline = self.server.loop.time() + delay_s


class HttpServer:
    """Listens, and sweeps over its connections for those whose time is over."""

    def __init__(self, application: Application, limits: Limits, on_refused: OnRefused) -> None:
        self.application = application
        self.limits = limits
        self.on_refused = on_refused
        self.draining = False
        self.date_line = date_line()
        self.loop = asyncio.get_running_loop()
        self.outbox = Outbox(self.loop.call_soon)
        self._connections: set[_Connection] = set()
        self._empty = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        shortest_s = min(limits.header_timeout_s, limits.body_timeout_s, limits.idle_timeout_s)
        self._sweep_s = min(_SWEEP_S, shortest_s / 4)

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, *, reuse_port: bool = False, sock: socket.socket | None = None) -> int:
        """Listen on the address, or on a socket that is bound already; the port."""
        if sock is not None:
            made = await self.loop.create_server(self.accept, sock=sock, backlog=_BACKLOG)
        else:
            made = await self.loop.create_server(
                self.accept, host, port, reuse_port=reuse_port or None, backlog=_BACKLOG
            )
        self._listener = made
        for listening in made.sockets:
            _watch_peers(listening)
        self._sweep()
        bound: int = made.sockets[0].getsockname()[1]
        return bound

    async def drain(self, grace_s: float, end_requests: Callable[[], None] = lambda: None) -> None:
        """Take no new requests and let the open ones end in time; then have them ended, and cut off the rest."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self._connections):
            connection.close_if_idle()
        if not await self._emptied(grace_s):
            end_requests()
        if not await self._emptied(_LAST_WORDS_S):
            for connection in tuple(self._connections):
                connection.abort()
            await self._emptied(None)
        if self._sweeper is not None:
            self._sweeper.cancel()

    def add(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def remove(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def accept(self) -> _Connection:
        return _Connection(self)

    def _sweep(self) -> None:
        # First: whatever becomes of one connection, the others are looked at.
        self._sweeper = self.loop.call_later(self._sweep_s, self._sweep)
        self.date_line = date_line()
        now = self.loop.time()
        for connection in tuple(self._connections):
            if connection.deadline < now:
                connection.expire()

    async def _emptied(self, timeout_s: float | None) -> bool:
        self._empty.clear()
        if not self._connections:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def _watch_peers(listening: socket.socket) -> None:
    """Options that the connections of this socket inherit."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
