"""Speeds seen on legs, smoothed. `fleet.py` feeds them, `policies/sticky_least_loaded.py` weighs waiting against moving
with them."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.8
"""Weight of what was known before; the rest is the newest sample's."""
_SHORTEST_S = 1e-4


@dataclass(slots=True)
class Rate:
    """Tokens per second, as an average in which old samples fade."""

    tokens_per_s: float | None = None
    """None until the first sample."""

    def add(self, tokens: int, seconds: float) -> None:
        sample = tokens / max(seconds, _SHORTEST_S)
        known = self.tokens_per_s
        self.tokens_per_s = sample if known is None else _KEPT * known + (1 - _KEPT) * sample

    def seconds_for(self, tokens: int) -> float | None:
        """How long so many tokens take; None while unknown."""
        if self.tokens_per_s is None or self.tokens_per_s <= 0:
            return None
        return tokens / self.tokens_per_s


@dataclass(slots=True)
class MoveRates:
    """What a session's prefix costs on a replica that does not have it, for one role."""

    cold: Rate
    """Prompts of which nothing was known: computing."""
    pool: Rate
    """Prefixes found in the pool after a move: reading."""

    def seconds_for_prefix(self, tokens: int) -> float | None:
        """The slower of the two: a pool read can be slower than computing, and a save lags the turn that made it."""
        known = [each for each in (self.pool.seconds_for(tokens), self.cold.seconds_for(tokens)) if each is not None]
        return max(known) if known else None
