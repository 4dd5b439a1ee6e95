"""What can happen to one request. Made by the shell (`io/exchange.py`, `io/leg.py`) or, as a grant or a refusal, by the
dispatcher; fed to `flow.py`."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.core.asks import Grant, Refusal
from router.core.split import ClientBody, Route
from router.core.table import LegFailure

HowInterrupted = Literal["abort", "readmit", "keep", "asked", "shutdown"]
"""abort, readmit, keep: what the control plane does with running requests before new weights come. asked: someone named
this request's id. shutdown: the router ends, and can wait no longer."""


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """The client's request is here, whole."""

    number: int
    """Unique in this router, in the order of arrival."""
    sample_of: Arrived | None = None
    """The client's request, of which this is one sample: it has that one's place in the line and shares its session."""
    sample: ClientBody | None = None
    """What this sample asks for, in place of `body`."""
    route: Route
    path: str
    """The route's path; the same on the engines."""
    body: bytes
    session_header: str | None
    min_version: str | None
    deadline: float | None = None
    """Until when it has to be answered; None: the settings' time from now on."""
    request_key: str
    """Unique among all requests ever sent to these engines; ids of attempts are made from it."""
    asked_id: str | None = None
    """The client's X-Request-Id."""
    forwarded: bytes = b""
    """Header lines for the engines."""


class LegAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """A leg ended with a whole reply, of any status."""

    leg: int
    status: int
    body: bytes
    content_type: str


class LegStreaming(msgspec.Struct, frozen=True, kw_only=True):
    """A leg answered 200 with a stream, of which the first whole line is here. Nothing was relayed yet."""

    leg: int
    head: bytes
    content_type: str


class LegFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A leg ended without a whole reply. Its connection is closed."""

    leg: int
    failure: LegFailure
    detail: str


class HandoffExpired(msgspec.Struct, frozen=True, kw_only=True):
    """A leg was not sent: the handoff in its body expired before it was. Its engine has seen nothing of it."""

    leg: int


class StreamEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A relayed stream is over, as its engine meant it."""

    leg: int


class ClientGone(msgspec.Struct, frozen=True):
    """The client closed its connection."""


class TimeReached(msgspec.Struct, frozen=True):
    """The moment is here that the last `until` named."""


class Thawed(msgspec.Struct, frozen=True):
    """The gate is no longer frozen: what had to stay open may be closed."""


class Interrupted(msgspec.Struct, frozen=True):
    """The request must not go on as it is."""

    how: HowInterrupted


Event = (
    Arrived
    | Grant
    | Refusal
    | LegAnswered
    | LegStreaming
    | LegFailed
    | HandoffExpired
    | StreamEnded
    | ClientGone
    | TimeReached
    | Thawed
    | Interrupted
)
