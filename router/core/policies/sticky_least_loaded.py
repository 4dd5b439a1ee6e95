"""A session stays where it is; a new one goes where the fewest sessions are.

Counting sessions, not requests, is what spreads agents that think between their turns: at any moment
most of them have no request open, and yet each will come back. The order among equals (tokens in flight,
then least recently chosen) lives in `LoadIndex`; without its last part every session that arrives while
all is idle would go to the first replica.
"""

from __future__ import annotations

from router.core.load import LoadIndex
from router.core.policies.base import ChoiceContext

_NONE: frozenset[str] = frozenset()


class StickyLeastLoadedPolicy:
    """See the module text."""

    def choose(self, context: ChoiceContext, load: LoadIndex) -> str | None:
        pinned = context.pinned
        if pinned is not None and pinned not in context.avoid and load.is_present(pinned):
            return pinned
        return load.least_loaded(context.avoid) or load.least_loaded(_NONE)
