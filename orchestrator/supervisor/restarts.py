"""When a process that ends again and again may be started again: pure. `watch.py` asks."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
FORGOTTEN_AFTER_S = 3600.0
"""A process that ran this long since a restart is not blamed for it any more."""


def may_start_at(restarts: Sequence[float]) -> float:
    """`restarts`: when it was started again, in their order. At once the first time, then after pauses that double."""
    if not restarts:
        return 0.0
    last = restarts[-1]
    recent = sum(last - each < FORGOTTEN_AFTER_S for each in restarts)
    return last + float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (recent - 1)))
