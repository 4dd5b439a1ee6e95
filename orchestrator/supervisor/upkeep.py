"""Which processes of a running job are started now: what is wanted of each against what is seen of it. Pure, and the
same answer for the same input however often it is asked. `watch.py` sees, asks, and carries the answer out.

Every unit of the plan is wanted up. One that has ended, or was not ready in its time, gets another life; so does one
that lives and of which somebody wants another life. When, and whether at all, says its row of ends (`restarts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.plan.kinds import UnitKind
from orchestrator.supervisor.restarts import Row

LifeState = Literal["ready", "coming_up", "ended"]
"""ended: also one that used up its time and is not ready."""

_NEEDS: Mapping[UnitKind, tuple[UnitKind, ...]] = {
    "storage": ("master",),
    "engine": ("master",),
}
"""What has to be ready first. The others, and engines once they run, do without the master for a while."""


@dataclass(frozen=True, kw_only=True)
class UnitSight:
    """One unit at this look."""

    name: str
    kind: UnitKind
    state: LifeState
    is_replaced: bool
    """Somebody wants another life of it."""
    row: Row


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    start: tuple[str, ...]
    """In this order: what others need comes first."""
    given_up: Mapping[str, Row]
    """Crash loops."""


def upkeep(sights: Sequence[UnitSight], now: float) -> Upkeep:
    """`sights`: of all units, in the order in which the plan starts them."""
    wanted = [sight for sight in sights if sight.is_replaced or sight.state == "ended"]
    given_up = {sight.name: sight.row for sight in wanted if sight.row.is_spent}
    missing = {sight.kind for sight in sights if sight.state != "ready" and sight.name not in given_up}
    start = tuple(
        sight.name
        for sight in wanted
        if sight.name not in given_up
        and now >= sight.row.may_start_at
        and missing.isdisjoint(_NEEDS.get(sight.kind, ()))
    )
    return Upkeep(start=start, given_up=given_up)
