"""One connection to an engine: carries one call at a time and tells the call's listener what comes back.

`client.py` opens connections, keeps the idle ones and sends calls over them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal, Protocol, cast

from router.io.http1.message import JOIN_BELOW
from router.io.http1.outbox import Outbox
from router.io.http1.reply_reader import BrokenReplyError, ReplyReader

_log = logging.getLogger(__name__)

Failure = Literal["unreachable", "broken", "late", "local"]
"""Why a call has no reply. late: the moment until which it may be sent has passed; local: this machine lacks what a
connection needs (files, ports, memory), which says nothing about the engine."""


class CallListener(Protocol):
    """Hears of one call: `head` and `data` as they come, then exactly one of `ended` and `failed`.

    Nothing comes before `send` has returned, nothing after `Call.close`.
    """

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The head of the reply; names in lower case."""

    def data(self, chunk: bytes) -> None:
        """A piece of the body, freed of its framing."""

    def ended(self) -> None:
        """All of the reply was there."""

    def failed(self, failure: Failure, detail: str) -> None:
        """There is no reply, or no more of it."""


class Carried(Protocol):
    """What a connection needs of the call that it carries."""

    listener: CallListener
    send_by: float | None
    """No byte may leave after this moment of the monotonic clock."""

    def fail(self, failure: Failure, detail: str) -> None:
        """There will be no reply."""

    def connection_done(self) -> None:
        """The reply has ended; the connection carries the call no longer."""

    def connection_broke(self, detail: str, *, answered: bool) -> None:
        """The connection is lost, and with it the reply."""


class Owner(Protocol):
    """Who keeps the connections."""

    def released(self, connection: EngineConnection) -> None:
        """It can take another call."""

    def lost(self, connection: EngineConnection) -> None:
        """It is closed."""


class EngineConnection(asyncio.Protocol):
    """See the module text."""

    __slots__ = (
        "_answered",
        "_behind",
        "_call",
        "_outbox",
        "_owner",
        "_paused",
        "_reader",
        "_sent_in",
        "_told_head",
        "idle_since",
        "origin",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, owner: Owner, origin: tuple[str, int], outbox: Outbox) -> None:
        self._owner = owner
        self._outbox = outbox
        self.origin = origin
        self._reader = ReplyReader()
        self._call: Carried | None = None
        self._answered = False
        self._told_head = False
        self._paused = False
        self._behind = False
        """The kernel has not taken all that the transport was given."""
        self._sent_in = -1
        """The outbox's turn in which the last request was written."""
        self.idle_since = 0.0

    @property
    def unsent(self) -> bool:
        """Bytes of the request wait here for the kernel to take them."""
        return self._behind or self._sent_in == self._outbox.turn

    def carry(self, call: Carried, head: bytes, body: bytes) -> None:
        """Send a request; its reply goes to the call's listener."""
        assert self._call is None, "a second call on one connection"
        self._call = call
        self._answered = self._told_head = False
        self._reader.expect()
        self._sent_in = self._outbox.turn
        if len(body) < JOIN_BELOW:
            self._outbox.write(self.transport, head + body)
        else:
            self._outbox.write(self.transport, head)
            self._outbox.write(self.transport, body)
        if call.send_by is not None:
            self._outbox.only_until(call.send_by, self.transport, self._too_late)

    def let_go(self) -> None:
        """The call is given up: nothing more is told, and the engine sees its client leave."""
        self._call = None
        self.transport.abort()

    def end(self, detail: str) -> None:
        """Close; a call that is open has failed."""
        call, self._call = self._call, None
        self.transport.abort()
        if call is not None:
            call.connection_broke(detail, answered=self._answered)

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Every byte that the kernel doesn't take at once counts as unsent, and uvloop sends without waiting.
        self.transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Nobody has asked for this.
            self.transport.abort()
            return
        self._answered = True
        reader = self._reader
        try:
            reader.feed(data)
        except BrokenReplyError as broken:
            self.end(f"the reply can't be read: {broken}")
            return
        try:
            if not self._told_head:
                if reader.status is None:
                    return
                self._told_head = True
                call.listener.head(reader.status, reader.reply_headers)
            pieces = reader.pieces
            if pieces:
                chunk = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces.clear()
                if self._call is not call:
                    return
                call.listener.data(chunk)
            if reader.complete and self._call is call:
                self._end(call)
        except Exception:
            _log.exception("a listener failed on its reply")
            if self._call is call:
                call.connection_done()
                self.let_go()

    def eof_received(self) -> None:
        if self._call is not None and self._reader.until_close:
            self._end(self._call)
        else:
            self.end("the connection was closed")

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)
        self.end("the connection was closed" if error is None else str(error) or type(error).__name__)
        self._reader.close()

    def pause_writing(self) -> None:
        self._behind = True

    def resume_writing(self) -> None:
        self._behind = False

    # Inside

    def _too_late(self) -> None:
        """The turn of the loop took so long that the request must not be sent any more."""
        call, self._call = self._call, None
        self._behind = True
        self.transport.abort()
        if call is not None:
            call.fail("late", "the moment until which it may be sent passed within a turn of the event loop")

    def _end(self, call: Carried) -> None:
        """The listener hears it last, when the connection can already take what it sends next."""
        listener = call.listener
        self._call = None
        call.connection_done()
        if self._paused:
            self.resume()
        if self._reader.reusable and not self.unsent and not self.transport.is_closing():
            self._owner.released(self)
        else:
            self.transport.close()
        try:
            listener.ended()
        except Exception:
            _log.exception("a listener failed on the end of its reply")
