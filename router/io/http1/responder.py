"""The reply to one request, as the application writes it.

`server.py` makes a responder per request and passes it to the application. Once the reply has ended or the client has
gone it is let go of by its connection and does nothing more: a late write can't reach the next request's reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.io.http1.message import BODILESS, JOIN_BELOW, STATUS_LINES, header_lines

_CLOSE = "Connection: close\r\n"
_KEEP_ALIVE = "Connection: keep-alive\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Server(Protocol):
    """What a responder needs of its server."""

    date_line: str
    draining: bool
    """Connections close after their reply."""


class Connection(Protocol):
    """What a responder needs of its connection."""

    writable: bool

    @property
    def server(self) -> Server: ...

    def send(self, data: bytes) -> None:
        """Towards the client, behind what was sent before."""

    def reply_ended(self, *, keep_alive: bool) -> None:
        """Go on with the next request, or close."""

    def reply_aborted(self) -> None:
        """Close at once."""


class Responder:
    """See the module text. Call `reply`, or `start`, `write` and `end`."""

    __slots__ = ("_bodiless", "_chunked", "_connection", "_http10", "_keep_alive", "started")

    def __init__(self, connection: Connection, method: str, *, http10: bool, keep_alive: bool) -> None:
        self._connection: Connection | None = connection
        self._bodiless = method == "HEAD"
        self._http10 = http10
        self._keep_alive = keep_alive
        self._chunked = False
        self.started = False

    @property
    def writable(self) -> bool:
        """False while the client reads more slowly than is written."""
        return self._connection is None or self._connection.writable

    def reply(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """The whole reply."""
        connection = self._connection
        if connection is None:
            return
        length = "" if status in BODILESS else f"Content-Length: {len(body)}\r\n"
        head = self._head(connection, status, headers, length)
        if self._bodiless or status in BODILESS:
            connection.send(head)
        elif len(body) < JOIN_BELOW:
            connection.send(head + body)
        else:
            connection.send(head)
            connection.send(body)
        self._end(connection)

    def start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        """The head of a reply whose body follows piece by piece."""
        connection = self._connection
        if connection is None:
            return
        framing = ""
        if status in BODILESS:
            self._bodiless = True
        elif self._http10:
            # Its body ends where the connection does.
            self._keep_alive = False
        else:
            self._chunked = not self._bodiless
            framing = "Transfer-Encoding: chunked\r\n"
        connection.send(self._head(connection, status, headers, framing))

    def write(self, data: bytes) -> None:
        """One piece of the body."""
        connection = self._connection
        # An empty chunk would end the body.
        if connection is None or self._bodiless or not data:
            return
        if not self._chunked:
            connection.send(data)
        elif len(data) < JOIN_BELOW:
            connection.send(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            for piece in (b"%x\r\n" % len(data), data, b"\r\n"):
                connection.send(piece)

    def end(self) -> None:
        """The reply that was started is complete."""
        connection = self._connection
        if connection is None:
            return
        if self._chunked:
            connection.send(_LAST_CHUNK)
        self._end(connection)

    def abort(self) -> None:
        """Close the connection, so that the client can't take what it has for the whole reply."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.reply_aborted()

    def forget(self) -> None:
        """The client has gone: whatever the application still says is ignored."""
        self._connection = None

    def _head(self, connection: Connection, status: int, headers: Sequence[tuple[str, str]], framing: str) -> bytes:
        assert not self.started, "a second reply to one request"
        lines = header_lines(headers)
        server = connection.server
        self._keep_alive = self._keep_alive and not server.draining
        persistence = "" if self._keep_alive else _CLOSE
        if self._http10 and self._keep_alive:
            persistence = _KEEP_ALIVE
        text = f"{STATUS_LINES[status]}{lines}{framing}{persistence}{server.date_line}\r\n"
        head = text.encode("latin-1")
        self.started = True
        return head

    def _end(self, connection: Connection) -> None:
        self._connection = None
        connection.reply_ended(keep_alive=self._keep_alive)
