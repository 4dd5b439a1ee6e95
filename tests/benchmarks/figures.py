"""The figures of a run: rounds of ours and of a peer, medians, ratios, and how they are printed. Pure.

`parts.py` fills those of the routers, `weights/parts.py` those of weight loads; the last line of a run is `result_line`
of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Key = Literal[
    "cpu_ratio_3k7",
    "cpu_ratio_116k",
    "rps_ratio_3k7",
    "rps_ratio_116k",
    "p99_ratio",
    "sse_cpu_ratio",
    "pick_us",
    "idle_sessions_mb",
]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a key of the result means, and the value that it should reach."""

    key: str
    title: str
    unit: str
    bound: Literal["at most", "at least"]
    limit: float
    is_ratio: bool
    """The value is ours divided by the peer's; else it is ours alone."""
    peer: str = "peer"
    """What ours is compared with, in a word."""


GOALS = (
    Goal(
        key="cpu_ratio_3k7",
        title="router CPU per request, 3.7 kB body, 64 connections",
        unit="us",
        bound="at most",
        limit=0.5,
        is_ratio=True,
    ),
    Goal(
        key="cpu_ratio_116k",
        title="router CPU per request, 116 kB body, 64 connections",
        unit="us",
        bound="at most",
        limit=0.15,
        is_ratio=True,
    ),
    Goal(
        key="rps_ratio_3k7",
        title="requests per second, 3.7 kB body, 64 connections",
        unit="/s",
        bound="at least",
        limit=1.5,
        is_ratio=True,
    ),
    Goal(
        key="rps_ratio_116k",
        title="requests per second, 116 kB body, 64 connections",
        unit="/s",
        bound="at least",
        limit=4.0,
        is_ratio=True,
    ),
    Goal(
        key="p99_ratio",
        title="p99 latency at the peer's saturation rate, 3.7 kB body",
        unit="ms",
        bound="at most",
        limit=0.7,
        is_ratio=True,
    ),
    Goal(
        key="sse_cpu_ratio",
        title="router CPU per streamed token, 256 streams of 50 tokens/s",
        unit="us",
        bound="at most",
        limit=1.0,
        is_ratio=True,
    ),
    Goal(
        key="pick_us",
        title="one choice among 1,000 replicas and 100,000 sessions",
        unit="us",
        bound="at most",
        limit=10.0,
        is_ratio=False,
    ),
    Goal(
        key="idle_sessions_mb",
        title="memory of open idle sessions with their connections",
        unit="MB",
        bound="at most",
        limit=50.0,
        is_ratio=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One goal, measured."""

    goal: Goal
    ours: Sequence[float]
    """One value per round."""
    peer: Sequence[float]
    """The same rounds; empty where there is nothing to compare with."""
    notes: Sequence[str] = ()

    @property
    def value(self) -> float:
        return median(self.ours) / median(self.peer) if self.goal.is_ratio else median(self.ours)

    @property
    def is_met(self) -> bool:
        return self.value <= self.goal.limit if self.goal.bound == "at most" else self.value >= self.goal.limit

    def report(self) -> str:
        goal = self.goal
        verdict = "met" if self.is_met else "NOT met"
        lines = [
            goal.title,
            f"  {goal.key} = {rounded(self.value):g}, {goal.bound} {goal.limit:g} wanted: {verdict}",
            _rounds("ours", self.ours, goal.unit),
        ]
        if self.peer:
            lines.append(_rounds(goal.peer, self.peer, goal.unit))
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def goal_of(key: Key) -> Goal:
    return next(goal for goal in GOALS if goal.key == key)


def rounded(value: float) -> float:
    """Three significant digits: more would be noise."""
    return float(f"{value:.3g}")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def result_line(figures: Sequence[Figure], goals: Sequence[Goal] = GOALS) -> str:
    """One JSON object with a key per goal; null for what was left out of this run."""
    values = {figure.goal.key: rounded(figure.value) for figure in figures}
    return json.dumps({goal.key: values.get(goal.key) for goal in goals})


def _rounds(name: str, values: Sequence[float], unit: str) -> str:
    listed = " ".join(f"{value:.4g}" for value in values)
    return (
        f"  {name}: median {median(values):.4g} {unit}, spread {min(values):.4g} to {max(values):.4g}, rounds {listed}"
    )
