"""Jobs and their started processes, as recorded. The record is written before the act.

A pid cannot be written before its process is: that one gap is closed by the run's id, which every process carries.
`supervisor/start.py` writes the record as a job comes up, `watch.py` while it runs, `stop.py` as it ends; status and
logs read it, also after the writer was killed.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

from deploy.unit import UnitRecord
from orchestrator.errors import HeadraceError, JobExists, JobUnknown
from orchestrator.plan.port_map import ports_of
from orchestrator.plan.types import JobPlan, plan_to_json
from orchestrator.store.database import Database, is_in_phase
from orchestrator.store.events import Event, EventKind, EventStore, note
from orchestrator.store.keeping import end_open_requests
from orchestrator.store.records import ENDED, SERVING, JobHead, Phase, StoredJob, StoredUnit
from orchestrator.store.updates import end_open_updates

REASON_LINES_TOLD = 2
"""What happened, and its cause."""


class PortsReserved(HeadraceError):
    """Another job planned some of these ports since the plan was made: plan again."""


class JobStore:
    """Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.events = EventStore(database)

    def folder(self, name: str) -> Path:
        """Where a job's files and logs lie."""
        return self._database.home / "jobs" / name

    def create(self, plan: JobPlan, *, run_id: str, directory: Path, now: float) -> None:
        """Record a job that is about to start; an ended one of the same name gives way.

        Raises:
            JobExists: one of this name is recorded and not ended.
            PortsReserved: a job recorded since this one was planned has planned the same ports.
        """
        with self._database.transaction() as connection:
            _refuse_recorded(connection, plan.job)
            _refuse_reserved(connection, plan)
            connection.execute("DELETE FROM jobs WHERE name = ?", (plan.job,))
            connection.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, 'starting', '', ?, ?, NULL, NULL, NULL, ?)",
                (plan.job, run_id, str(directory), str(plan.socket_dir), plan_to_json(plan), now, now, _ports(plan)),
            )
            note(connection, plan.job, _phase_event(run_id, "starting", ""), now)

    def refuse_recorded(self, name: str) -> None:
        """What `create` will say of the name, before anything is planned.

        Raises:
            JobExists: a job of this name is recorded and not ended.
        """
        with self._database.reading() as connection:
            _refuse_recorded(connection, name)

    def delete(self, name: str, run_id: str) -> None:
        """Forget a run that has ended, with all that was recorded of it, and the job's events."""
        with self._database.transaction() as connection:
            if connection.execute("DELETE FROM jobs WHERE name = ? AND run_id = ?", (name, run_id)).rowcount:
                connection.execute("DELETE FROM events WHERE job = ?", (name,))

    def get(self, name: str) -> StoredJob:
        """The job of this name.

        Raises:
            JobUnknown: none is recorded; the text lists those that are.
        """
        job = self.find(name)
        if job is None:
            raise JobUnknown(name, self.names())
        return job

    def find(self, name: str) -> StoredJob | None:
        """The job of this name, or None where none is recorded."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
            return None if row is None else _job(connection, row)

    def heads(self) -> list[JobHead]:
        """Of all jobs, by name."""
        with self._database.reading() as connection:
            units = defaultdict(list)
            for row in connection.execute("SELECT * FROM units ORDER BY job, started_at, name"):
                units[row["job"], row["run_id"]].append(_unit(row))
            return [
                JobHead(**_head(row), units=tuple(units[row["name"], row["run_id"]]))
                for row in connection.execute(f"SELECT {', '.join(_HEAD)} FROM jobs ORDER BY name")
            ]

    def head(self, name: str) -> JobHead | None:
        """None where no job of this name is recorded."""
        with self._database.reading() as connection:
            row = connection.execute(f"SELECT {', '.join(_HEAD)} FROM jobs WHERE name = ?", (name,)).fetchone()
            return None if row is None else JobHead(**_head(row), units=_units(connection, row))

    def names(self) -> list[str]:
        with self._database.reading() as connection:
            return [row["name"] for row in connection.execute("SELECT name FROM jobs ORDER BY name")]

    def unended(self) -> dict[str, Phase]:
        """The phases of all jobs that have not ended, by name."""
        with self._database.reading() as connection:
            query = f"SELECT name, phase FROM jobs WHERE phase NOT IN ({_marks(ENDED)}) ORDER BY name"
            return {row["name"]: row["phase"] for row in connection.execute(query, ENDED)}

    def serving_names(self) -> list[str]:
        with self._database.reading() as connection:
            query = f"SELECT name FROM jobs WHERE phase IN ({_marks(SERVING)}) ORDER BY name"
            return [row["name"] for row in connection.execute(query, SERVING)]

    def set_phase(self, name: str, run_id: str, phase: Phase, reason: str, now: float) -> bool:
        """Move a run to a phase; False where the run is no longer the job's, or already further on its way out. Updates
        and requests that are open end with their run."""
        with self._database.transaction() as connection:
            return _set_phase(connection, name, run_id, phase, reason, now)

    def ask_stop(
        self, name: str, run_id: str, *, drain_until: float | None, now: float, only_unopened: bool = False
    ) -> bool:
        """Note that somebody wants the run ended, and until when its open requests may finish. Asked for again, only
        the latter changes. False where it has ended, or, with `only_unopened`, where it has come up."""
        with self._database.transaction() as connection:
            query = "SELECT phase, reason, opened_at FROM jobs WHERE name = ? AND run_id = ?"
            before = connection.execute(query, (name, run_id)).fetchone()
            if before is None or (only_unopened and before["opened_at"] is not None):
                return False
            reason = before["reason"] if before["phase"] == "stopping" else ""
            if not _set_phase(connection, name, run_id, "stopping", reason, now):
                return False
            change = "UPDATE jobs SET stop_asked_at = coalesce(stop_asked_at, ?), drain_until = ? WHERE name = ?"
            connection.execute(change, (now, drain_until, name))
            return True

    def is_starting(self, name: str, run_id: str) -> bool:
        """Whether this run is still wanted up: nobody stopped it and no other run took its place."""
        return self._is_in(name, run_id, ("starting",))

    def is_serving(self, name: str, run_id: str) -> bool:
        """Whether this run has come up and nobody stopped it."""
        return self._is_in(name, run_id, SERVING)

    def _is_in(self, name: str, run_id: str, phases: tuple[Phase, ...]) -> bool:
        with self._database.reading() as connection:
            return is_in_phase(connection, name, run_id, phases)

    def add_unit(self, job: str, run_id: str, record: UnitRecord, now: float) -> None:
        """Record a process that has just been started, in the place of its life before, if it had one."""
        with self._database.transaction() as connection:
            query = "SELECT 1 FROM units WHERE job = ? AND run_id = ? AND name = ?"
            had_life = connection.execute(query, (job, run_id, record.name)).fetchone() is not None
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
            kind: EventKind = "process_restarted" if had_life else "process_started"
            text = f"{record.name} was started{' again' if had_life else ''} as pid {record.pid}"
            event = Event(kind=kind, process=record.name, text=text, data={"pid": record.pid, "node": record.node})
            note(connection, job, event, now)

    def remove_unit(self, job: str, run_id: str, name: str, now: float) -> None:
        """Forget a process that was ended because the plan has it no more, and how its lives ended."""
        with self._database.transaction() as connection:
            where = "WHERE job = ? AND run_id = ? AND name = ?"
            if connection.execute(f"DELETE FROM units {where}", (job, run_id, name)).rowcount:
                connection.execute("DELETE FROM unit_ends WHERE job = ? AND unit = ?", (job, name))
                note(connection, job, Event(kind="process_removed", process=name, text=f"{name} was removed"), now)

    def replan(self, run_id: str, plan: JobPlan, now: float) -> None:
        """Let a job that serves go by another plan from now on.

        Raises:
            PortsReserved: another job has some of its ports.
        """
        with self._database.transaction() as connection:
            _refuse_reserved(connection, plan)
            where = f"WHERE name = ? AND run_id = ? AND phase IN ({_marks(SERVING)})"
            values = (plan_to_json(plan), _ports(plan), plan.job, run_id, *SERVING)
            if not connection.execute(f"UPDATE jobs SET plan = ?, ports = ? {where}", values).rowcount:
                return
            engines: Counter[str] = Counter(engine.role for engine in plan.engines)
            text = f"planned anew: {', '.join(f'{count} {role}' for role, count in engines.items())}"
            note(connection, plan.job, Event(kind="job_replanned", text=text, data=dict(engines)), now)

    def set_ready(self, job: str, run_id: str, unit: str, now: float) -> None:
        with self._database.transaction() as connection:
            done = connection.execute(
                "UPDATE units SET ready_at = ?1 WHERE job = ?2 AND run_id = ?3 AND name = ?4 RETURNING ?1 - started_at",
                (now, job, run_id, unit),
            ).fetchone()
            if done is not None:
                event = Event(kind="process_ready", process=unit, text=f"{unit} is ready", data={"after_s": done[0]})
                note(connection, job, event, now)

    def reserved_ports(self, except_job: str) -> frozenset[int]:
        """Ports that the other jobs which have not ended have planned."""
        with self._database.reading() as connection:
            return _reserved_ports(connection, except_job)


def _set_phase(connection: sqlite3.Connection, name: str, run_id: str, phase: Phase, reason: str, now: float) -> bool:
    blocked = ENDED if phase in ("stopping", *ENDED) else ("stopping", *ENDED)
    query = f"SELECT phase, reason FROM jobs WHERE name = ? AND run_id = ? AND phase NOT IN ({_marks(blocked)})"
    before = connection.execute(query, (name, run_id, *blocked)).fetchone()
    if before is None:
        return False
    change = "UPDATE jobs SET phase = ?, reason = ?, phase_at = ? WHERE name = ?"
    connection.execute(change, (phase, reason, now, name))
    if phase in SERVING:
        connection.execute("UPDATE jobs SET opened_at = ? WHERE name = ? AND opened_at IS NULL", (now, name))
    if phase in ENDED:
        # Nobody goes on with what a job that has ended was asked for.
        end_open_updates(connection, name, f"the job has {phase}", now)
        end_open_requests(connection, name, f"the job has {phase}", now)
    if tuple(before) != (phase, reason):
        note(connection, name, _phase_event(run_id, phase, reason), now)
    return True


def ended_event(record: UnitRecord, exit_code: int | None) -> Event:
    """Of a process that is seen to have ended. Its exit code is known to its parent alone."""
    how = "" if exit_code is None else f" with exit code {exit_code}"
    text = f"{record.name} (pid {record.pid}) ended{how}"
    return Event(kind="process_ended", process=record.name, text=text, data={"pid": record.pid, "exit_code": exit_code})


def planned_ports(plan: JobPlan) -> frozenset[int]:
    """Every port that no other job may plan while this one lives."""
    listed = {port.port for unit in plan.units for port in unit.ports}
    return frozenset(listed | ports_of(plan.ports))


def _ports(plan: JobPlan) -> str:
    """As they are recorded: apart from the plan, which only the version that made it can read."""
    return json.dumps(sorted(planned_ports(plan)))


def _refuse_recorded(connection: sqlite3.Connection, name: str) -> None:
    row = connection.execute("SELECT phase FROM jobs WHERE name = ?", (name,)).fetchone()
    if row is not None and row["phase"] not in ENDED:
        mend = f"stop it with `headrace down {name}`, or give this one another name"
        raise JobExists(f"job {name!r} is already recorded as {row['phase']}; {mend}")


def _refuse_reserved(connection: sqlite3.Connection, plan: JobPlan) -> None:
    clash = sorted(planned_ports(plan) & _reserved_ports(connection, except_job=plan.job))
    if clash:
        raise PortsReserved(f"ports {', '.join(map(str, clash))} of job {plan.job!r} belong to another job")


def _reserved_ports(connection: sqlite3.Connection, except_job: str) -> frozenset[int]:
    query = f"SELECT DISTINCT value FROM jobs, json_each(ports) WHERE name != ? AND phase NOT IN ({_marks(ENDED)})"
    return frozenset(row["value"] for row in connection.execute(query, (except_job, *ENDED)))


def _phase_event(run_id: str, phase: Phase, reason: str) -> Event:
    # A failed start's reason goes on with the last lines of a log, whatever stands there.
    short = "; ".join(line.strip() for line in reason.splitlines()[:REASON_LINES_TOLD])
    text = f"{phase}: {short}" if short else phase
    return Event(kind="job_phase", text=text, data={"phase": phase, "run_id": run_id})


def _marks(values: tuple[Phase, ...]) -> str:
    return ", ".join("?" * len(values))


def _job(connection: sqlite3.Connection, row: sqlite3.Row) -> StoredJob:
    return StoredJob(**_head(row), plan_text=row["plan"], units=_units(connection, row))


def _units(connection: sqlite3.Connection, row: sqlite3.Row) -> tuple[StoredUnit, ...]:
    query = "SELECT * FROM units WHERE job = ? AND run_id = ? ORDER BY started_at, name"
    return tuple(_unit(unit) for unit in connection.execute(query, (row["name"], row["run_id"])))


_HEAD = [field.name for field in fields(JobHead) if field.name != "units"]
"""Columns have the names of what they are read into."""


def _head(row: sqlite3.Row) -> dict[str, Any]:
    """All of it but the units."""
    paths = {column: Path(row[column]) for column in ("directory", "socket_dir")}
    return {column: row[column] for column in _HEAD} | paths


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
