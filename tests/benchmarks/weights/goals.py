"""What the benchmark of weight loads measures, and the values that it should reach. Pure."""

from __future__ import annotations

from tests.benchmarks.figures import Goal

GOALS = (
    Goal(
        key="gpu_fetch_time_ratio",
        title="gpu_fetch: a load, beside one plain transfer of the same bytes by the same transport",
        unit="s",
        bound="at most",
        limit=1.3,
        is_ratio=True,
        peer="plain",
    ),
    Goal(
        key="gpu_fetch_extra_memory_ratio",
        title="gpu_fetch: peak extra host memory (resident, pinned included), part of the rank's weights",
        unit="",
        bound="at most",
        limit=0.05,
        is_ratio=False,
    ),
    Goal(
        key="cpu_prefetch_pause_ratio",
        title="cpu_prefetch: the load after the prefetch, beside a plain copy of the same bytes",
        unit="s",
        bound="at most",
        limit=1.2,
        is_ratio=True,
        peer="plain",
    ),
    Goal(
        key="prefetch_slowdown",
        title="cpu_prefetch: time per generated token while a version is prefetched, beside that without",
        unit="ms",
        bound="at most",
        limit=1.1,
        is_ratio=True,
        peer="alone",
    ),
    Goal(
        key="nixl_bytes_ratio",
        title="nixl, 2 trainer ranks to 2 generators: bytes read, beside what the generators need",
        unit="MB",
        bound="at most",
        limit=1.02,
        is_ratio=True,
        peer="needed",
    ),
    Goal(
        key="nixl_evenness",
        title="nixl, 2 trainer ranks to 2 generators: bytes of the busiest producer, beside an even share",
        unit="MB",
        bound="at most",
        limit=1.05,
        is_ratio=True,
        peer="even share",
    ),
    Goal(
        key="replay_plan_ratio",
        title="planning of a second load (the load plan and the transport's), part of the load",
        unit="s",
        bound="at most",
        limit=0.01,
        is_ratio=True,
        peer="the load",
    ),
)


def goal_of(key: str) -> Goal:
    return next(goal for goal in GOALS if goal.key == key)
