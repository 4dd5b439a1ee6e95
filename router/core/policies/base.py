"""What a routing policy is given and what it answers.

`fleet.py` asks, once per leg and per role; it owns the reservation that follows. One policy object serves
one role, so prefill and decode are decided independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.core.asks import Reason
from router.core.load import LoadIndex
from router.core.rates import MoveRates
from router.core.table import Member


class ChoiceContext(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What is known about the leg to place."""

    key: str
    """Equal for all requests of a session, different otherwise."""
    pinned: Member | None
    """Where the session's last leg of this role went; may be unusable by now."""
    avoid: frozenset[str]
    """Replicas on which this request has failed already: taken only where nothing else is left."""
    prefix_tokens: int
    """How much of the prompt the pinned replica has seen before, estimated."""
    moved_at: float
    """When the session last changed its replica because waiting was dear."""
    rates: MoveRates
    now: float


class Choice(msgspec.Struct, frozen=True, eq=False):
    """A member with room, and why it."""

    member: Member
    reason: Reason


class Policy(Protocol):
    """Chooses among the members with room of the given indexes (one per epoch that will do, newest first)."""

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        """The member for the next leg, or None if none has room."""
        ...


NOBODY: frozenset[str] = frozenset()


def least_loaded(indexes: Sequence[LoadIndex], avoid: frozenset[str]) -> Member | None:
    """The least loaded of all, outside `avoid` where that is possible."""
    if len(indexes) == 1:
        return indexes[0].least_loaded(avoid) or (indexes[0].least_loaded(NOBODY) if avoid else None)
    found = [each for each in (index.least_loaded(avoid) for index in indexes) if each is not None]
    if found:
        return min(found, key=lambda each: (each.sessions, each.tokens, each.chosen))
    return least_loaded(indexes, NOBODY) if avoid else None


def without(members: Sequence[Member], avoid: frozenset[str]) -> Sequence[Member]:
    """The members outside `avoid`; all of them where none would be left."""
    return ([each for each in members if each.name not in avoid] if avoid else members) or members


def candidates(indexes: Sequence[LoadIndex]) -> list[Member]:
    """All members with room, in the order of their joining."""
    if len(indexes) == 1:
        return indexes[0].in_order()
    return sorted((each for index in indexes for each in index.in_order()), key=lambda each: each.order)
