"""What is recorded of a job: its run, its processes, its plan. `jobs.py` reads and writes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from deploy.unit import RunContext, UnitRecord
from orchestrator.errors import HeadraceError, ProcessUnknown
from orchestrator.plan.types import JobPlan, plan_from_json

Phase = Literal["starting", "ready", "degraded", "failed", "stopping", "stopped", "abandoned"]
"""degraded: serves, with something a user should know. abandoned is seen, never recorded: whoever brought the job up,
or ended it, is gone half way (`supervisor/view.py`)."""
SERVING: tuple[Phase, ...] = ("ready", "degraded")
ENDED: tuple[Phase, ...] = ("failed", "stopped")
"""Phases in which nothing of the job runs and its name is free. A run that has ended stays as it ended."""


class RecordUnreadable(HeadraceError):
    """A job, or something of it, was recorded by another version of Headrace."""

    def __init__(self, job: str) -> None:
        mend = f"stop it with `headrace down {job}` and start it again"
        super().__init__(f"job {job!r} was recorded by another version of Headrace; {mend}")


@dataclass(frozen=True, kw_only=True)
class StoredUnit:
    record: UnitRecord
    started_at: float
    """Unix time."""
    ready_at: float | None


@dataclass(frozen=True, kw_only=True)
class JobHead:
    """What is recorded of a job but its plan, which is most of it."""

    name: str
    run_id: str
    directory: Path
    socket_dir: Path
    phase: Phase
    reason: str
    """Why it is in this phase, where that needs saying."""
    created_at: float
    phase_at: float
    opened_at: float | None
    """When it had come up; None where it never did."""
    stop_asked_at: float | None
    """When somebody first asked that it ends; None: nobody did."""
    drain_until: float | None
    """Open requests may finish until then, before a stop ends anything; None: at once."""
    units: tuple[StoredUnit, ...]

    @property
    def run(self) -> RunContext:
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.created_at))
        log_dir = self.directory / "logs" / f"{started}-{self.run_id[:8]}"
        return RunContext(job=self.name, run_id=self.run_id, log_dir=log_dir, private_dir=self.socket_dir)

    @property
    def records(self) -> tuple[UnitRecord, ...]:
        return tuple(unit.record for unit in self.units)


@dataclass(frozen=True, kw_only=True)
class StoredJob(JobHead):
    plan_text: str

    @cached_property
    def plan(self) -> JobPlan:
        """Raises `RecordUnreadable`. Read when it is asked for: what another version recorded can still be ended."""
        return read_plan(self.name, self.plan_text)

    def check_plan(self) -> None:
        """Raises `RecordUnreadable`."""
        _ = self.plan

    @property
    def unit_names(self) -> list[str]:
        return [unit.name for unit in self.plan.units]

    def log_of(self, unit: str) -> Path:
        """Where a process of the job writes its log, which is there once it was started.

        Raises:
            ProcessUnknown: the text lists those that the job has.
        """
        if unit not in self.unit_names:
            raise ProcessUnknown(self.name, unit, self.unit_names)
        return self.run.log_dir / f"{unit}.log"


def read_plan(name: str, text: str) -> JobPlan:
    """Raises `RecordUnreadable`."""
    try:
        return plan_from_json(text)
    except ValidationError as error:
        raise RecordUnreadable(name) from error
