"""What a request's flow asks the shell to do. Made by `flow.py`, carried out by `io/exchange.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.core.replies import Reply
from router.core.stream import StreamMerge
from router.settings import EngineRole

LegOutcome = Literal["ok", "client_error", "engine_error", "unreachable", "broken", "timeout", "expired", "cancelled"]
"""How a leg ended. expired: it was never sent, its handoff had become too old on the way to the connection."""

HandoffOutcome = Literal["sent", "missing", "expired", "unused"]
"""What became of a handoff. One whose leg was begun and could not be sent in time counts as sent and as expired."""


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
    """What is left of the whole request's time."""
    send_by: float | None
    """No byte may leave after this moment: the handoff in the body would reach its engine too late (field case A39).
    None where no handoff is sent."""


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
