"""One request to one engine: bytes of its reply in, events for the flow out.

`exchange.py` makes one per `SendLeg` and hands it to the HTTP client as the listener of its call. A reply that is no
stream is collected whole; of a stream the first line is held back until it is whole, the rest goes straight to the
client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from router.core.commands import SendLeg
from router.core.events import HandoffExpired, LegAnswered, LegFailed, LegStreaming, StreamEnded
from router.core.stream import FIRST_LINE_LIMIT
from router.core.table import LegFailure
from router.io.http1.client import Call, Failure

if TYPE_CHECKING:
    from router.io.exchange import Exchange

REPLY_LIMIT = 1 << 30
"""Bytes of a reply that is kept until it is whole; the longest real ones carry the scores of a long prompt."""

_EVENT_STREAM = b"text/event-stream"


class Leg(msgspec.Struct, eq=False):
    """See the module text."""

    command: SendLeg
    _exchange: Exchange
    call: Call | None = None
    accepted: bool = False
    """The engine has answered: it has the request."""
    _mode: Literal["whole", "first_line", "relaying", "parked", "over"] = "whole"
    _status: int = 0
    _content_type: bytes = b""
    _parts: list[bytes] = []
    _size: int = 0
    _held: bytes = b""

    @property
    def over(self) -> bool:
        return self._mode == "over"

    # -- what the HTTP client tells ------------------------------------------------------------------------

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.accepted = True
        self._status = status
        self._content_type = headers.get(b"content-type", b"application/octet-stream")
        if self._mode == "whole" and status == 200 and self._content_type.startswith(_EVENT_STREAM):
            self._mode = "first_line"

    def data(self, chunk: bytes) -> None:
        mode = self._mode
        if mode == "relaying":
            self._exchange.relay(chunk)
        elif mode == "whole":
            self._parts.append(chunk)
            self._size += len(chunk)
            if self._size > REPLY_LIMIT:
                self.fail("broken", "its reply goes on without end")
        elif mode == "first_line":
            self._held += chunk
            if b"\n" in self._held:
                # Before the event: carrying it out starts the relay.
                head, self._held, self._mode = self._held, b"", "relaying"
                streaming = LegStreaming(
                    leg=self.command.leg, head=head, content_type=self._content_type.decode("latin-1")
                )
                self._exchange.feed(streaming)
            elif len(self._held) > FIRST_LINE_LIMIT + len(self.command.body):
                self.fail("broken", "its stream's first line goes on without end")

    def ended(self) -> None:
        mode, self._mode = self._mode, "over"
        if mode in ("relaying", "parked"):
            self._exchange.leg_over(StreamEnded(leg=self.command.leg))
        elif mode == "whole":
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            content_type = self._content_type.decode("latin-1")
            self._exchange.leg_over(
                LegAnswered(leg=self.command.leg, status=self._status, body=body, content_type=content_type)
            )
        elif mode == "first_line":
            self._fail("broken", "the stream ended before its first line")

    def failed(self, failure: Failure, detail: str) -> None:
        if self._mode == "over":
            return
        if failure == "late":
            self._mode = "over"
            self._exchange.leg_over(HandoffExpired(leg=self.command.leg))
        else:
            self._fail(failure, detail)

    # -- what the exchange and the fleet ask ---------------------------------------------------------------

    def close(self) -> None:
        """Close the connection if the reply is not over; the engine sees its client leave."""
        self._mode = "over"
        if self.call is not None:
            self.call.close()

    def park(self) -> None:
        """Nobody reads the reply any more; let it come and forget it."""
        self._mode = "parked"
        self._parts.clear()
        self._held = b""
        if self.call is not None:
            self.call.resume()

    def lose(self, *, silent: bool) -> None:
        """Its replica was taken out of use: end it as one that can't be reached, unless it is a stream that still
        flows."""
        if self._mode == "over" or (self._mode in ("relaying", "parked") and not silent):
            return
        self.fail("unreachable", "it was taken out of use")

    def fail(self, failure: LegFailure, detail: str) -> None:
        """Close the connection for a reason that is the replica's."""
        self.close()
        self._fail(failure, detail)

    def _fail(self, failure: LegFailure, detail: str) -> None:
        self._mode = "over"
        self._exchange.leg_over(LegFailed(leg=self.command.leg, failure=failure, detail=detail))
