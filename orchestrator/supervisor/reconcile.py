"""What to do next about a job that comes up: pure, and the same answer for the same input however often it is asked.

`start.py` observes, calls `next_step` and carries the answer out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.unit import LaunchUnit
from orchestrator.supervisor.state import SeenUnits, unit_state


@dataclass(frozen=True, kw_only=True)
class UnitFailure:
    """The unit that ended a start, and how."""

    unit: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """The next step of a start. At most one of its parts says something."""

    start: tuple[str, ...] = ()
    """Units to start now, in order."""
    failure: UnitFailure | None = None
    all_ready: bool = False


def next_step(units: Sequence[LaunchUnit], seen: SeenUnits, now: float) -> Step:
    """Units of a stage start together once every unit of the stages below is ready."""
    failure = first_failure(units, seen, now)
    if failure is not None:
        return Step(failure=failure)
    for stage in sorted({unit.start_stage for unit in units}):
        in_stage = [unit for unit in units if unit.start_stage == stage]
        missing = tuple(unit.name for unit in in_stage if unit.name not in seen)
        if missing:
            return Step(start=missing)
        if not all(seen[unit.name].ready for unit in in_stage):
            return Step()
    return Step(all_ready=True)


def first_failure(units: Sequence[LaunchUnit], seen: SeenUnits, now: float) -> UnitFailure | None:
    """The first unit, in plan order, that died or used up its time."""
    for unit in units:
        one = seen.get(unit.name)
        if one is None:
            continue
        if unit_state(one) == "dead":
            return UnitFailure(
                unit=unit.name, what=f"ended{_exit_words(one.exit_code)} after {now - one.started_at:.0f} s"
            )
        if not one.ready and now - one.started_at > unit.ready_timeout_s:
            last = f" ({one.detail})" if one.detail else ""
            what = f"was not ready within {unit.ready_timeout_s:.0f} s{last}"
            return UnitFailure(unit=unit.name, what=what)
    return None


def _exit_words(exit_code: int | None) -> str:
    if exit_code is None:
        return ""
    return f" by signal {-exit_code}" if exit_code < 0 else f" with exit code {exit_code}"
