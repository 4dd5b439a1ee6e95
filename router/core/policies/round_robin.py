"""Replicas in turn, whatever the session.

The place in the round is kept as a replica's fixed order, not as an index into those present: with an index
the round would skip or repeat replicas whenever one leaves or returns.
"""

from __future__ import annotations

from router.core.load import LoadIndex
from router.core.policies.base import ChoiceContext


class RoundRobinPolicy:
    """See the module text."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, context: ChoiceContext, load: LoadIndex) -> str | None:
        loads = load.in_order()
        start = self._last + 1
        turn = [each for each in (*loads[start:], *loads[:start]) if each.present]
        best = next((each for each in turn if each.name not in context.avoid), None) or next(iter(turn), None)
        if best is None:
            return None
        self._last = best.order
        return best.name
