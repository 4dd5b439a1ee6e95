"""What a routing policy is given and what it answers.

`fleet.py` asks, once per leg and per role; it owns the reservation that follows. One policy object serves
one role, so prefill and decode are decided independently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.core.load import LoadIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceContext:
    """What is known about the leg to place."""

    pinned: str | None
    """Where the session's last leg of this role went; may be unusable by now."""
    avoid: frozenset[str]
    """Replicas on which this request has failed already: taken only where nothing else is left."""


class Policy(Protocol):
    """Chooses a replica among those present in the load index."""

    def choose(self, context: ChoiceContext, load: LoadIndex) -> str | None:
        """The replica for the next leg, or None if no replica is present."""
        ...
