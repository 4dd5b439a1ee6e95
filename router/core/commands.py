"""What a request's flow asks the shell to do. Made by `flow.py`, carried out by `io/server.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.core.replies import Reply
from router.core.stream import StreamMerge
from router.settings import EngineRole

LegOutcome = Literal["ok", "client_error", "engine_error", "unreachable", "broken", "timeout", "cancelled"]
HandoffOutcome = Literal["sent", "missing", "expired", "unused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendLeg:
    """Send a request to an engine and report how it goes. At most one leg of a request is alive."""

    leg: int
    role: EngineRole
    replica: str
    url: str
    body: bytes
    request_id: str
    """X-Request-Id: the same on both legs of an attempt, different between attempts."""
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelLeg:
    """Close a leg's connection."""

    leg: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Send the client a whole reply; the request is over."""

    reply: Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRelay:
    """Begin the client's reply with `first` and relay the leg's further bytes through `merge`."""

    leg: int
    replica: str
    headers: tuple[tuple[str, str], ...]
    content_type: str
    first: bytes
    merge: StreamMerge


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRelay:
    """End the client's reply with `last`; the request is over."""

    last: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CountLeg:
    role: EngineRole
    outcome: LegOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class CountHandoff:
    outcome: HandoffOutcome


@dataclass(frozen=True, slots=True)
class CountRetry:
    pass


@dataclass(frozen=True, slots=True)
class CountClientGone:
    pass


Count = CountLeg | CountHandoff | CountRetry | CountClientGone
Command = SendLeg | CancelLeg | Answer | StartRelay | EndRelay | Count
