"""A session stays where it is until waiting there costs more than moving; a new one goes where the fewest sessions are.

Counting sessions, not requests, is what spreads agents that think between their turns: at any moment
most of them have no request open, and yet each will come back. The order among equals (tokens in flight,
then least recently chosen) lives in `LoadIndex`; without its last part every session that arrives while
all is idle would go to the first replica.

The pool holds the KV, so a move costs reading the session's prefix (or computing it again, if that is what it comes
to). It is made when the queue at the pinned replica, by the speed at which tokens were seen to leave it, is longer than
that and the other queue together by a clear margin. Factor, margin and a rest after each move keep sessions from
swinging.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.asks import Reason
from router.core.load import LoadIndex
from router.core.policies.base import Choice, ChoiceContext, least_loaded
from router.core.table import Member
from router.settings import MoveRules


class StickyLeastLoadedPolicy:
    """See the module text. `move` None: a session never leaves a replica that has room."""

    def __init__(self, move: MoveRules | None) -> None:
        self._move = move

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        pinned = context.pinned
        if pinned is None:
            member = least_loaded(indexes, context.avoid)
            return Choice(member, "new") if member is not None else None
        failed_here = bool(context.avoid) and pinned.name in context.avoid
        if pinned.present and pinned.index in indexes and not failed_here:
            return self._stay_or_move(pinned, context, indexes)
        member = least_loaded(indexes, context.avoid)
        if member is None:
            return None
        reason: Reason = "moved_failed" if failed_here else "moved_full" if pinned.usable else "moved_lost"
        return Choice(member, "pinned" if member is pinned else reason)

    def _stay_or_move(self, pinned: Member, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice:
        stay = Choice(pinned, "pinned")
        if self._move is None or not pinned.tokens or context.now - context.moved_at < self._move.rest_s:
            return stay
        waits_s = pinned.drain.seconds_for(pinned.tokens)
        if waits_s is None or waits_s < self._move.min_gain_s:
            return stay
        other = least_loaded(indexes, context.avoid)
        if other is None or other is pinned:
            return stay
        reads_s = context.rates.seconds_for_prefix(context.prefix_tokens)
        waits_there_s = other.drain.seconds_for(other.tokens) if other.tokens else 0.0
        if reads_s is None or waits_there_s is None:
            return stay
        costs_s = (reads_s + waits_there_s) * self._move.factor + self._move.min_gain_s
        return Choice(other, "moved_wait") if waits_s > costs_s else stay
