"""Jobs and their started processes, as recorded. The record is written before the act.

`supervisor/loop.py` writes it; status, logs and stop read it, also after the writer was killed.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from deploy.unit import RunContext, UnitRecord
from orchestrator.errors import JobExists, JobUnknown
from orchestrator.plan.types import JobPlan, plan_from_json, plan_to_json
from orchestrator.store.database import Database

Phase = Literal["starting", "ready", "degraded", "failed", "stopping", "stopped"]
ENDED: tuple[Phase, ...] = ("failed", "stopped")
"""Phases in which nothing of the job runs and its name is free."""


@dataclass(frozen=True, kw_only=True)
class StoredUnit:
    record: UnitRecord
    started_at: float
    """Unix time."""
    ready_at: float | None


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    name: str
    run_id: str
    directory: Path
    socket_dir: Path
    plan: JobPlan
    phase: Phase
    reason: str
    """Why it is in this phase, where that needs saying."""
    created_at: float
    phase_at: float
    units: tuple[StoredUnit, ...]

    @property
    def run(self) -> RunContext:
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.created_at))
        log_dir = self.directory / "logs" / f"{started}-{self.run_id[:8]}"
        return RunContext(job=self.name, run_id=self.run_id, log_dir=log_dir)

    @property
    def records(self) -> tuple[UnitRecord, ...]:
        return tuple(unit.record for unit in self.units)


class JobStore:
    """Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def folder(self, name: str) -> Path:
        """Where a job's files and logs lie."""
        return self._database.home / "jobs" / name

    def create(self, plan: JobPlan, *, run_id: str, directory: Path, socket_dir: Path, now: float) -> None:
        """Record a job that is about to start; an ended one of the same name gives way.

        Raises:
            JobExists: one of this name is recorded and not ended.
        """
        with self._database.transaction() as connection:
            row = connection.execute("SELECT phase FROM jobs WHERE name = ?", (plan.job,)).fetchone()
            if row is not None and row["phase"] not in ENDED:
                mend = f"stop it with `headrace down {plan.job}`, or give this one another name"
                raise JobExists(f"job {plan.job!r} is already {row['phase']}; {mend}")
            connection.execute("DELETE FROM jobs WHERE name = ?", (plan.job,))
            connection.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, 'starting', '', ?, ?)",
                (plan.job, run_id, str(directory), str(socket_dir), plan_to_json(plan), now, now),
            )

    def get(self, name: str) -> StoredJob:
        """The job of this name.

        Raises:
            JobUnknown: none is recorded; the text lists those that are.
        """
        with self._database.transaction() as connection:
            row = connection.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
            if row is None:
                known = [row["name"] for row in connection.execute("SELECT name FROM jobs ORDER BY name")]
                listed = ", ".join(known) if known else "none"
                raise JobUnknown(f"no job is called {name!r}; recorded jobs: {listed}")
            return _job(connection, row)

    def all(self) -> list[StoredJob]:
        with self._database.transaction() as connection:
            rows = connection.execute("SELECT * FROM jobs ORDER BY name").fetchall()
            return [_job(connection, row) for row in rows]

    def set_phase(self, name: str, run_id: str, phase: Phase, reason: str, now: float) -> bool:
        """Move a run to a phase; False where the run is no longer the job's, or already further on its way out."""
        assert phase in get_args(Phase)
        blocked = {"failed": ("stopped",), "stopped": (), "stopping": ENDED}.get(phase, ("stopping", *ENDED))
        marks = ", ".join("?" * len(blocked)) or "''"
        with self._database.transaction() as connection:
            done = connection.execute(
                f"UPDATE jobs SET phase = ?, reason = ?, phase_at = ? "
                f"WHERE name = ? AND run_id = ? AND phase NOT IN ({marks})",
                (phase, reason, now, name, run_id, *blocked),
            )
            return done.rowcount == 1

    def add_unit(self, job: str, run_id: str, record: UnitRecord, now: float) -> None:
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                (
                    job,
                    run_id,
                    record.name,
                    record.node,
                    record.pid,
                    record.start_ticks,
                    record.boot_id,
                    str(record.log),
                    now,
                ),
            )

    def set_ready(self, job: str, unit: str, now: float) -> None:
        with self._database.transaction() as connection:
            connection.execute("UPDATE units SET ready_at = ? WHERE job = ? AND name = ?", (now, job, unit))

    def reserved_ports(self, except_job: str) -> frozenset[int]:
        """Ports that the other jobs which have not ended have planned."""
        jobs = [job for job in self.all() if job.name != except_job and job.phase not in ENDED]
        listed = {port.port for job in jobs for unit in job.plan.units for port in unit.ports}
        return frozenset(listed.union(*(range(*job.plan.port_span) for job in jobs)))


def _job(connection: sqlite3.Connection, row: sqlite3.Row) -> StoredJob:
    units = connection.execute(
        "SELECT * FROM units WHERE job = ? AND run_id = ? ORDER BY started_at, name", (row["name"], row["run_id"])
    ).fetchall()
    return StoredJob(
        name=row["name"],
        run_id=row["run_id"],
        directory=Path(row["directory"]),
        socket_dir=Path(row["socket_dir"]),
        plan=plan_from_json(row["plan"]),
        phase=row["phase"],
        reason=row["reason"],
        created_at=row["created_at"],
        phase_at=row["phase_at"],
        units=tuple(_unit(unit) for unit in units),
    )


def _unit(row: sqlite3.Row) -> StoredUnit:
    record = UnitRecord(
        name=row["name"],
        node=row["node"],
        pid=row["pid"],
        start_ticks=row["start_ticks"],
        boot_id=row["boot_id"],
        log=Path(row["log"]),
    )
    return StoredUnit(record=record, started_at=row["started_at"], ready_at=row["ready_at"])
