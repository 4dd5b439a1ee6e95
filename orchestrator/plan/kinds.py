"""What each process of a plan is for: the kinds that supervision tells apart, and the names of those there is one of.

The units are planned in `pool_units.py`, `engine_units.py` and `front_units.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from orchestrator.plan.types import JobPlan

UnitKind = Literal["master", "storage", "engine", "router", "monitoring"]
MASTER = "mooncake-master"
ROUTER = "router"
PROMETHEUS = "prometheus"


def kinds_of(plan: JobPlan) -> dict[str, UnitKind]:
    """The kind of every unit, by name, in the order in which they are started."""
    return dict(_kinds(plan))


def _kinds(plan: JobPlan) -> Iterator[tuple[str, UnitKind]]:
    single: dict[str, UnitKind] = {MASTER: "master", ROUTER: "router", PROMETHEUS: "monitoring"}
    engines = {engine.name for engine in plan.engines}
    storage = {client.name for client in plan.pool.clients} if plan.pool is not None else set()
    for unit in sorted(plan.units, key=lambda unit: unit.start_stage):
        if unit.name in engines:
            yield unit.name, "engine"
        elif unit.name in storage:
            yield unit.name, "storage"
        else:
            yield unit.name, single[unit.name]
