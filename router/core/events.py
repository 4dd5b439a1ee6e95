"""What can happen to one request. Made by `io/exchange.py` and `io/upstream.py`, fed to `flow.py`."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.table import LegFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """The client's request is here, whole."""

    path: str
    """The route's path; the same on the engines."""
    body: bytes
    session_header: str | None
    request_key: str
    """Unique among all requests ever sent to these engines; ids of attempts are made from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LegAnswered:
    """A leg ended with a whole reply, of any status."""

    leg: int
    status: int
    body: bytes
    content_type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LegStreaming:
    """A leg answered 200 with a stream, of which the first whole line is here. Nothing was relayed yet."""

    leg: int
    head: bytes
    content_type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LegFailed:
    """A leg ended without a whole reply. Its connection is closed."""

    leg: int
    failure: LegFailure
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffExpired:
    """A leg was not sent: the handoff in its body expired before it was. Its engine has seen nothing of it."""

    leg: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEnded:
    """A relayed stream is over, as its engine meant it."""

    leg: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection."""


Event = Arrived | LegAnswered | LegStreaming | LegFailed | HandoffExpired | StreamEnded | ClientGone
