"""What whoever starts a job knows of each unit, as data. `start.py` fills it in, `reconcile.py` decides on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

UnitState = Literal["waiting", "starting", "ready", "dead"]


@dataclass(frozen=True, kw_only=True)
class SeenUnit:
    """One unit as last observed."""

    started_at: float
    """Same clock as `now`."""
    alive: bool
    ready: bool
    """Has answered its probe at least once."""
    detail: str
    """The probe's own words, e.g. "GET /health: connection refused"."""
    exit_code: int | None = None


SeenUnits = Mapping[str, SeenUnit]
"""By unit name; a unit that is absent was not started."""


def unit_state(seen: SeenUnit | None) -> UnitState:
    if seen is None:
        return "waiting"
    if not seen.alive:
        return "dead"
    return "ready" if seen.ready else "starting"
