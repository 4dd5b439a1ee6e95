"""Each request to the replica that carries the fewest, whatever the session."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.load import LoadIndex
from router.core.policies.base import Choice, ChoiceContext, least_loaded


class LeastLoadedPolicy:
    """Sessions end with their requests here, so the fewest sessions are the fewest requests."""

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        member = least_loaded(indexes, context.avoid)
        return Choice(member, "unpinned") if member is not None else None
