"""Replicas in turn, whatever the session.

The place in the round is kept as a replica's fixed order, not as an index into those present: with an index
the round would skip or repeat replicas whenever one leaves or returns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from router.core.load import LoadIndex
from router.core.policies.base import Choice, ChoiceContext, candidates, without


class RoundRobinPolicy:
    """See the module text."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        members = without(candidates(indexes), context.avoid)
        if not members:
            return None
        at = bisect_right(members, self._last, key=lambda each: each.order)
        member = members[at % len(members)]
        self._last = member.order
        return Choice(member, "unpinned")
