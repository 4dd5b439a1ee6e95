"""What a request's flow asks the shell to do. Made by `flow.py`, carried out by `io/exchange.py`."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.core.asks import Ask, LegEnd, LegOutcome, Reason
from router.core.client_stream import Relay
from router.core.replies import Reply
from router.core.split import ClientBody
from router.settings import EngineRole

HandoffOutcome = Literal["sent", "missing", "expired", "unused"]
"""What became of a handoff. One whose leg was begun and could not be sent in time counts as sent and as expired."""


class AskReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the dispatcher; its answer is the next event, now or later."""

    ask: Ask
    until: float
    """Feed `TimeReached` then, unless something else has happened."""


class SendLeg(msgspec.Struct, frozen=True, kw_only=True):
    """Send a request to an engine and report how it goes. At most one leg of a request is alive."""

    leg: int
    role: EngineRole
    replica: str
    instance: str
    epoch: int
    url: str
    """Base URL of the replica."""
    path: str
    body: bytes
    request_id: str
    """X-Request-Id: the same on both legs of an attempt, different between attempts."""
    until: float
    """Feed `TimeReached` then, unless the leg has ended or a stream has begun."""
    deadline: float
    """The same for a stream that has begun."""
    send_by: float | None
    """No byte may leave after this moment: the handoff in the body would reach its engine too late (field case A39).
    None where no handoff is sent."""


class CancelLeg(msgspec.Struct, frozen=True, kw_only=True):
    """Close a leg's connection."""

    leg: int


class ParkLeg(msgspec.Struct, frozen=True, kw_only=True):
    """Let a leg run on without a reader: the gate is frozen. Report its end, or `Thawed`."""

    leg: int


class EndLeg(msgspec.Struct, frozen=True):
    """Tell the dispatcher that a leg is over."""

    end: LegEnd


class Leave(msgspec.Struct, frozen=True):
    """Tell the dispatcher that the request is over; nothing comes after it."""

    request: int


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Feed `TimeReached` at that moment."""

    until: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Send the client a whole reply."""

    reply: Reply


class StartRelay(msgspec.Struct, frozen=True, kw_only=True):
    """Begin the client's reply with `first` and relay the leg's further bytes through `merge`."""

    leg: int
    replica: str
    headers: tuple[tuple[str, str], ...]
    content_type: str
    first: bytes
    merge: Relay


class ContinueRelay(msgspec.Struct, frozen=True, kw_only=True):
    """Go on with the client's reply, which began with another leg: write `first`, relay this leg's further bytes."""

    leg: int
    first: bytes
    merge: Relay


class EndRelay(msgspec.Struct, frozen=True, kw_only=True):
    """End the client's reply with `last`."""

    last: bytes


class GatherSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Serve each of these bodies as a request of its own and make one reply of theirs; this flow has no more to do."""

    body: ClientBody
    parts: list[ClientBody]
    deadline: float
    per_prompt: int


class CountLeg(msgspec.Struct, frozen=True, kw_only=True):
    role: EngineRole
    outcome: LegOutcome


class CountChoice(msgspec.Struct, frozen=True, kw_only=True):
    role: EngineRole
    reason: Reason


class CountHandoff(msgspec.Struct, frozen=True, kw_only=True):
    outcome: HandoffOutcome


class CountRetry(msgspec.Struct, frozen=True):
    pass


class CountClientGone(msgspec.Struct, frozen=True):
    pass


class CountReadmitted(msgspec.Struct, frozen=True):
    pass


Count = CountLeg | CountChoice | CountHandoff | CountRetry | CountClientGone | CountReadmitted
Command = (
    AskReplica
    | SendLeg
    | CancelLeg
    | ParkLeg
    | EndLeg
    | Leave
    | Pause
    | Answer
    | StartRelay
    | ContinueRelay
    | EndRelay
    | GatherSamples
    | Count
)
