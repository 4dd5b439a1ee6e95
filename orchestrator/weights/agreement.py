"""Does a reply agree with replays of its request that read nothing older than themselves? Pure: log-probabilities in, a
judgement out. `audit.py` collects them.

The same tokens after the same prompt, on the same weights, have the same log-probabilities but for noise: kernels round
differently with the size of a batch, and with how much of a prompt is cached. How much that is on these engines only
they can tell, so each request is replayed several times: computed whole, and from the cache that this has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

FLOOR = 1e-3
"""Nats. Engines whose replays are all alike may still be off by rounding that these did not meet."""
TIMES_NOISE = 4.0
UNSTEADY = 0.25
"""Nats. Where replays differ among themselves by more, only the grossest fault would stand out."""
WORST = 9999.0
"""Nats: below -9999 vLLM tells nothing, and what is no number at all is as far away."""

Outcome = Literal["agrees", "disagrees", "unsteady"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    outcome: Outcome
    compared: int
    """Tokens, from the first one on."""
    off_by: float
    """The most that a token is away from the nearest replay."""
    at: int
    """That token's place."""
    noise: float
    """The most that replays differ by at one token."""
    allowed: float
    """What `off_by` may be."""


def judge(given: Sequence[float], replays: Sequence[Sequence[float]]) -> Judgement:
    """`given`: a reply's log-probabilities, of one token or more. `replays`: what each of at least two gave the same
    tokens."""
    places = list(zip(*replays, strict=True))
    apart = [min(_apart(score, had) for score in scores) for had, scores in zip(given, places, strict=True)]
    noise = max(_apart(*pair) for scores in places for pair in combinations(scores, 2))
    off_by, allowed = max(apart), max(FLOOR, TIMES_NOISE * noise)
    outcome: Outcome = "unsteady" if noise > UNSTEADY else "disagrees" if off_by > allowed else "agrees"
    return Judgement(
        outcome=outcome, compared=len(given), off_by=off_by, at=apart.index(off_by), noise=noise, allowed=allowed
    )


def _apart(one: float, other: float) -> float:
    distance = abs(one - other)
    return distance if distance <= WORST else WORST
