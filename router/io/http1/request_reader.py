"""Bytes of a client -> one `Request`.

`server.py` makes a reader at the first byte of each request and drops it at the last one, so that an idle connection
holds no parser. Every part whose length is not known beforehand (a head, a chunked body) ends with an empty line, so
the parser is fed up to the next empty line at most: what follows may be the next request and is given back.
"""

from __future__ import annotations

import re
from functools import lru_cache

import httptools

from router.io.http1.message import HEAD_END, HeaderCollector, Limits, RefusedError, Request, split_target

_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_TAIL = len(HEAD_END) - 1
_HOST = re.compile(rb"(\[[\w.~:%-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""A Host header's value; two of them, joined by a comma and a space, are none."""
_FRAMING_PER_BYTE = 8
"""A chunk of one byte is six bytes long. What a body's framing takes beyond this counts like a header."""


def _cut(text: bytes, at: int) -> int:
    """Where the first empty line ends of which the last byte is not before `at`; else the length of the text."""
    found = text.find(HEAD_END, max(0, at - _TAIL))
    return found + len(HEAD_END) if found >= 0 else len(text)


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    """Cached because clients name the same few."""
    return _HOST.fullmatch(value) is not None


class _ChunkedBody:
    """A body in chunks.

    A parser of its own, because llhttp gives up the body of a request that offers an upgrade, and those are served too.
    """

    __slots__ = ("_complete", "_max_bytes", "_max_framing", "_parser", "_pieces", "_received", "_tail")

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = limits.max_body_bytes
        self._max_framing = limits.max_header_bytes
        self._pieces = bytearray()
        self._received = 0
        self._tail = b""
        self._complete = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """The body, once it is complete, and what follows it."""
        # By index: copying what is left at each empty line would take a second for some 100 kB of them.
        text, at = self._tail + data, len(self._tail)
        while at < len(text):
            end = _cut(text, at)
            self._parser.feed_data(text[at:end])
            self._received += end - at
            if len(self._pieces) > self._max_bytes:
                raise RefusedError(413, f"the body is larger than {self._max_bytes} bytes")
            if self._received - _FRAMING_PER_BYTE * len(self._pieces) > self._max_framing:
                raise RefusedError(431, "the framing of the body is too large")
            at = end
            if self._complete:
                # It refers to this object.
                del self._parser
                return bytes(self._pieces), text[at:]
        self._tail = text[-_TAIL:]
        return None, b""

    def on_body(self, piece: bytes) -> None:
        self._pieces += piece

    def on_message_complete(self) -> None:
        self._complete = True


class RequestReader(HeaderCollector):
    """One request while it arrives."""

    __slots__ = (
        "_body",
        "_chunked",
        "_head_bytes",
        "_length",
        "_limits",
        "_parser",
        "_tail",
        "_url",
        "head_complete",
        "is_http10",
        "keep_alive",
        "method",
        "request",
        "wants_continue",
    )

    # What the parser looks for and finds here: an attribute that is missing costs it an exception.
    on_body = on_message_begin = on_message_complete = on_chunk_header = on_chunk_complete = None

    # Set when the head is complete.
    _chunked: _ChunkedBody | None
    _length: int
    method: str
    is_http10: bool
    keep_alive: bool
    wants_continue: bool
    """The client holds its body back until it is asked for it."""

    def __init__(self, limits: Limits) -> None:
        self.headers = {}
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._tail = b""
        self._head_bytes = 0
        self._url = b""
        self._body: bytearray | None = None
        self.head_complete = False
        self.request: Request | None = None
        """There once all of it is."""

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to this request; the rest is given back. May raise `RefusedError`."""
        try:
            if not self.head_complete:
                data = self._feed_head(data)
                if not self.head_complete:
                    return b""
                self._check_head()
            return self._feed_body(data)
        except httptools.HttpParserError as error:
            raise RefusedError(400, f"this is not HTTP/1.1: {error}") from error

    def _feed_head(self, data: bytes) -> bytes:
        text, at = self._tail + data, len(self._tail)
        while at < len(text) and not self.head_complete:
            end = _cut(text, at)
            self._head_bytes += end - at
            if self._head_bytes > self._limits.max_header_bytes:
                raise RefusedError(431, f"the head is larger than {self._limits.max_header_bytes} bytes")
            try:
                self._parser.feed_data(text[at:end])
            except httptools.HttpParserUpgrade:
                # It is an offer, and not taken: the head is like any other.
                self.head_complete = True
            at = end
        self._tail = text[-_TAIL:]
        return text[at:]

    def _check_head(self) -> None:
        parser, headers = self._parser, self.headers
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RefusedError(400, f"HTTP/{version} is not spoken here")
        self.is_http10 = version == "1.0"
        self.method = parser.get_method().decode("ascii")
        # It refers to this object, and nothing else is left for it to do.
        del self._parser
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            self._check_coding(coding)
            self._chunked = _ChunkedBody(self._limits)
        else:
            self._chunked = None
            self._length = int(headers.get(b"content-length", 0))
            if self._length > self._limits.max_body_bytes:
                raise RefusedError(413, f"the body is larger than {self._limits.max_body_bytes} bytes")
        expected = headers.get(b"expect")
        if expected is not None and expected.lower() != b"100-continue":
            raise RefusedError(417, "only 100-continue can be expected")
        host = headers.get(b"host", b"" if self.is_http10 else None)
        if host is None or not _is_host(host):
            raise RefusedError(400, "a request needs one Host header that names a host")
        self.wants_continue = expected is not None and not self.is_http10

    def _check_coding(self, coding: bytes) -> None:
        if self.is_http10 or b"content-length" in self.headers:
            raise RefusedError(400, "the length of the body is ambiguous")
        if coding.strip().lower() != b"chunked":
            raise RefusedError(501, "the only transfer coding is chunked")

    def _feed_body(self, data: bytes) -> bytes:
        if self._chunked is not None:
            body, rest = self._chunked.feed(data)
            if body is not None:
                self._finish(body)
            return rest
        length = self._length
        if self._body is None:
            if len(data) >= length:
                self._finish(data[:length])
                return data[length:]
            self._body = bytearray()
        missing = length - len(self._body)
        self._body += data[:missing]
        if len(self._body) == length:
            self._finish(bytes(self._body))
        return data[missing:]

    def _finish(self, body: bytes) -> None:
        target = self._url.decode("latin-1")
        path, query = split_target(target)
        self.request = Request(self.method, target, path, query, self.headers, body)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_headers_complete(self) -> None:
        self.head_complete = True
        # The parser forgets it at the end of the message.
        self.keep_alive = self._parser.should_keep_alive()
