"""Bytes of an engine -> one reply after another.

`engine_connection.py` feeds it and takes out what has come. llhttp knows nothing of the end of a connection, so
whether a reply ends there is told here.
"""

from __future__ import annotations

from collections.abc import Callable

import httptools

from router.io.http1.message import BODILESS, HeaderCollector


class BrokenReplyError(Exception):
    """This is not a reply."""


class ReplyReader(HeaderCollector):
    """The replies of one connection."""

    __slots__ = ("_parser", "complete", "on_body", "pieces", "reply_headers", "reusable", "status", "until_close")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        """Of the body, not yet taken out."""
        # Found here by the parser: the shortest way of a chunk into the list.
        self.on_body: Callable[[bytes], None] = self.pieces.append
        self.expect()
        self.reply_headers: dict[bytes, bytes] = {}
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def expect(self) -> None:
        """Get ready for the next reply."""
        self.headers = {}
        self.status: int | None = None
        """Once the head is there; its headers are `reply_headers`."""
        self.complete = False
        self.until_close = False
        """The end of the connection is the end of the reply."""
        self.reusable = False
        """Once complete: the connection can take another request."""

    def feed(self, data: bytes) -> None:
        """May raise `BrokenReplyError`; not if the reply was complete before what is wrong."""
        assert self._parser is not None, "fed after the end"
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.complete:
                raise BrokenReplyError(str(error)) from error
            self.reusable = False
        except httptools.HttpParserUpgrade:
            raise BrokenReplyError("the engine wants another protocol") from None

    def close(self) -> None:
        """Free the parser, which refers to this object."""
        self._parser = None

    def on_message_begin(self) -> None:
        if self.complete:
            raise BrokenReplyError("nobody has asked for what follows")

    def on_headers_complete(self) -> None:
        assert self._parser is not None, "a head after the end"
        status, headers = self._parser.get_status_code(), self.headers
        # Those of a 1xx reply are of no use, and trailers don't belong to the head.
        self.headers = {}
        if status < 200:
            return
        self.status, self.reply_headers = status, headers
        framed = b"content-length" in headers or headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        self.until_close = not framed and status not in BODILESS
        self.reusable = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.complete = True
