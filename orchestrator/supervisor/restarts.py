"""When a process that ends is started again, and when no more: pure, with all its numbers. `upkeep.py` asks.

Lives that end early, one after the other, are a row: the first of them is followed at once, the later ones after pauses
that double. A life that stayed ready for a while ends the row, so that what is killed now and then is always started
again. A row that has used up its budget is a crash loop: the process is given up, and what ended the *first* life of
the row is the reason that people are told. The later ones often end of what the first has left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.plan.kinds import UnitKind
from orchestrator.store.keeping import UnitEnd


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    first_pause_s: float
    """After the second life of a row; doubled after each that follows."""
    longest_pause_s: float
    steady_s: float
    """A life that was ready for so long was none of a crash loop."""
    budget: int
    """Lives of one row."""


POLICIES: Mapping[UnitKind, RestartPolicy] = {
    "master": RestartPolicy(first_pause_s=1.0, longest_pause_s=30.0, steady_s=30.0, budget=6),
    "storage": RestartPolicy(first_pause_s=1.0, longest_pause_s=60.0, steady_s=30.0, budget=6),
    "engine": RestartPolicy(first_pause_s=1.0, longest_pause_s=60.0, steady_s=30.0, budget=8),
    "router": RestartPolicy(first_pause_s=0.5, longest_pause_s=15.0, steady_s=10.0, budget=8),
    "monitoring": RestartPolicy(first_pause_s=5.0, longest_pause_s=300.0, steady_s=60.0, budget=5),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The newest ends of a unit that belong together, and what follows from them."""

    policy: RestartPolicy
    ends: tuple[UnitEnd, ...]

    @property
    def may_start_at(self) -> float:
        if len(self.ends) < 2:
            return 0.0
        pause_s = self.policy.first_pause_s * 2.0 ** (len(self.ends) - 2)
        return self.ends[-1].at + min(self.policy.longest_pause_s, pause_s)

    @property
    def is_spent(self) -> bool:
        return len(self.ends) >= self.policy.budget

    @property
    def first_cause(self) -> str:
        """Empty where nothing has ended."""
        return self.ends[0].cause if self.ends else ""

    def __str__(self) -> str:
        if len(self.ends) < 2:
            return self.first_cause
        took_s = self.ends[-1].at - self.ends[0].at
        return f"ended {len(self.ends)} times within {took_s:.0f} s, at first: {self.first_cause}"


def row_of(kind: UnitKind, ends: Sequence[UnitEnd]) -> Row:
    """`ends`: of one unit, in their order."""
    policy = POLICIES[kind]
    steady = [index for index, end in enumerate(ends) if end.ready_s >= policy.steady_s]
    return Row(policy=policy, ends=tuple(ends[steady[-1] if steady else 0 :]))


def job_failure(kinds: Mapping[str, UnitKind], given_up: Mapping[str, Row], *, can_serve: bool) -> str:
    """Why the job cannot live without what was given up; empty where it can. `can_serve`: the other engines include a
    pair. Without the pool every prompt is computed, and without monitoring nobody sees it: both can be lived without.
    """
    needed = ("router",) if can_serve else ("router", "engine")
    return "; ".join(f"{name} {row}" for name, row in given_up.items() if kinds[name] in needed)
