"""The better of two replicas drawn at random: nearly as even as looking at all of them, and no herd follows a late
figure.

The draws come from a counter run through a mixer (SplitMix64), so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.load import LoadIndex
from router.core.policies.base import Choice, ChoiceContext, candidates, without

_MASK = (1 << 64) - 1


class PowerOfTwoPolicy:
    """See the module text."""

    def __init__(self) -> None:
        self._state = 0

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        members = without(candidates(indexes), context.avoid)
        if not members:
            return None
        first = self._draw(len(members))
        second = (first + 1 + self._draw(len(members) - 1)) % len(members) if len(members) > 1 else first
        member = min((members[first], members[second]), key=lambda each: (each.legs, each.tokens, each.chosen))
        return Choice(member, "unpinned")

    def _draw(self, below: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return (mixed ^ mixed >> 31) % below
