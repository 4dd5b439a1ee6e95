"""What server and client share: a request as the application sees it, limits, and heads as bytes.

Readers (`request_reader.py`, `reply_reader.py`) make these from bytes, `responder.py` and `client.py` write them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

import msgspec

JOIN_BELOW = 64 * 1024
"""Up to this size copying a body behind its head is cheaper than handing the kernel two buffers."""
BODILESS = frozenset([204, 304])
"""Final statuses whose replies never have a body."""
HEAD_END = b"\r\n\r\n"

_AUTHORITY = re.compile(r"^[^/?#]*")


class _StatusLines(dict[int, str]):
    def __missing__(self, status: int) -> str:
        return f"HTTP/1.1 {status} \r\n"


STATUS_LINES = _StatusLines({each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n" for each in HTTPStatus})


class Request(msgspec.Struct):
    """One whole request."""

    method: str
    target: str
    """As the client wrote it."""
    path: str
    """Of the target, without query, not decoded."""
    query: str
    headers: dict[bytes, bytes]
    """As `HeaderCollector` makes them."""
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client may use up."""

    max_body_bytes: int
    max_header_bytes: int
    header_timeout_s: float
    """From the first byte of a request to the end of its head; a fresh connection has as long for its first byte."""
    body_timeout_s: float
    """Without a byte of a body that is not complete."""
    idle_timeout_s: float
    """Between two requests, or while the client takes nothing of a reply."""


class RefusedError(Exception):
    """A request that the application never sees."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def date_line() -> str:
    """What a reply says about the present second."""
    return f"Date: {formatdate(usegmt=True)}\r\n"


def header_lines(headers: Sequence[tuple[str, str]]) -> str:
    """Headers as text; a value can't smuggle in a line of its own."""
    if not headers:
        return ""
    lines = "\r\n".join(map(": ".join, headers)) + "\r\n"
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header with a line break")
    return lines


class HeaderCollector:
    """Where a parser puts headers one by one, of a request as of a reply."""

    __slots__ = ("headers",)

    headers: dict[bytes, bytes]
    """Names in lower case; values of repeated headers joined by a comma."""

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        headers = self.headers
        headers[name] = value if name not in headers else headers[name] + b", " + value


def split_target(target: str) -> tuple[str, str]:
    """Path and query of a request target, which may be a whole URL."""
    if target.startswith("/") and "?" not in target and "#" not in target:
        return target, ""
    if not target.startswith("/") and "://" in target:
        after_authority = _AUTHORITY.sub("", target.partition("://")[2], count=1)
        target = after_authority if after_authority.startswith("/") else "/" + after_authority
    path, _, query = target.partition("#")[0].partition("?")
    return path, query
