"""What has to survive of keeping a job's processes: how their lives ended, and what somebody has asked of them.

`supervisor/watch.py` notes ends, `replica_service.py` requests; `replica_keeper.py` carries requests out, and makes
some itself. All belongs to one run of a job, and goes with that run's record.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deploy.unit import UnitRecord
from orchestrator.errors import RequestRefused, RequestUnknown
from orchestrator.plan.types import JobPlan, plan_to_json
from orchestrator.store.database import Database, is_in_phase, newest_of_outcome
from orchestrator.store.events import Event, note
from orchestrator.store.records import SERVING, StoredJob, read_plan

RequestKind = Literal["restart", "drain", "undrain", "scale"]
RequestOutcome = Literal["done", "refused", "failed", "cancelled"]
"""cancelled: withdrawn before it was begun, or the job has ended before it had."""
ENDS_KEPT = 50
"""Per unit: more than any budget of restarts."""
REQUESTS_KEPT = 200
"""Of those of a run that have ended; older ones only where they say that a replica is drained."""


@dataclass(frozen=True, kw_only=True)
class UnitEnd:
    """One life of a process that ended, or that was given up."""

    at: float
    """Unix time."""
    ready_s: float
    """How long it had been ready; 0 where it never was."""
    cause: str


@dataclass(frozen=True, kw_only=True)
class ReplicaRequest:
    """What somebody has asked of one process of a job, or of all replicas of a role."""

    job: str
    run_id: str
    number: int
    """From 1 up within a run of the job."""
    kind: RequestKind
    unit: str
    """The process; the role that is scaled."""
    why: str
    """In words, for whoever looks."""
    is_forced: bool
    life: str
    """The one that a restart is to end; empty where a role is scaled."""
    replicas: int | None
    """How many a scaled role is to have."""
    asked_at: float
    begun_at: float | None
    outcome: RequestOutcome | None
    """None while it has not ended."""
    note: str
    """What a person should know of how it ended."""
    ended_at: float | None


def life_of(record: UnitRecord) -> str:
    """Names one life of a unit."""
    return f"{record.boot_id}:{record.pid}:{record.start_ticks}"


class KeepingStore:
    """Of all jobs; every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note_end(self, job: str, run_id: str, unit: str, life: str, end: UnitEnd) -> None:
        """Said again, of the same life, it stays as it was said first."""
        with self._database.transaction() as connection:
            if not _is_present(connection, job, run_id):
                return
            connection.execute(
                "INSERT OR IGNORE INTO unit_ends VALUES (?, ?, ?, ?, ?, ?)",
                (job, unit, life, end.at, end.ready_s, end.cause),
            )
            connection.execute(
                "DELETE FROM unit_ends WHERE job = ?1 AND unit = ?2 AND rowid NOT IN"
                " (SELECT rowid FROM unit_ends WHERE job = ?1 AND unit = ?2 ORDER BY rowid DESC LIMIT ?3)",
                (job, unit, ENDS_KEPT),
            )

    def forget_ends(self, job: str, unit: str) -> None:
        """Somebody wants it to be started as if it had never ended."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM unit_ends WHERE job = ? AND unit = ?", (job, unit))

    def ends(self, job: str) -> dict[str, list[UnitEnd]]:
        """By unit, in their order."""
        found: dict[str, list[UnitEnd]] = {}
        with self._database.reading() as connection:
            for row in connection.execute("SELECT * FROM unit_ends WHERE job = ? ORDER BY rowid", (job,)):
                end = UnitEnd(at=row["at"], ready_s=row["ready_s"], cause=row["cause"])
                found.setdefault(row["unit"], []).append(end)
        return found

    def ask(
        self, job: str, run_id: str, kind: RequestKind, record: UnitRecord, *, why: str, is_forced: bool, now: float
    ) -> int:
        """Note a request about the life that a unit has now; its number.

        Raises:
            RequestRefused: one about this unit has not ended yet, or the run does not serve any more.
        """
        with self._database.transaction() as connection:
            number = _next_number(connection, job, run_id, record.name)
            connection.execute(
                "INSERT INTO replica_requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, '', '', NULL, NULL, NULL)",
                (job, number, kind, record.name, why, is_forced, life_of(record), now),
            )
            text = f"request {number}: {kind} {record.name}{': ' + why if why else ''}"
            data = {"number": number, "request": kind, "forced": is_forced}
            note(connection, job, Event(kind="request_asked", text=text, process=record.name, data=data), now)
            return number

    def ask_scale(
        self, before: StoredJob, role: str, replicas: int, plan: JobPlan, *, is_forced: bool, now: float
    ) -> int:
        """Note that a job is to go by this plan, in which the role has so many replicas; the request's number.

        Raises:
            RequestRefused: the job is being scaled already, does not serve any more, or is not as it was `before`,
                when this was planned.
        """
        job = plan.job
        with self._database.transaction() as connection:
            number = _next_number(connection, job, before.run_id, role)
            query = "SELECT 1 FROM jobs WHERE name = ? AND plan = ?"
            if connection.execute(query, (job, before.plan_text)).fetchone() is None:
                raise RequestRefused(f"job {job!r} was planned anew meanwhile; ask again")
            query = "SELECT number FROM replica_requests WHERE job = ? AND kind = 'scale' AND outcome = ''"
            open_one = connection.execute(query, (job,)).fetchone()
            if open_one is not None:
                raise RequestRefused(f"request {open_one['number']} scales the job already; wait for its end")
            connection.execute(
                "INSERT INTO replica_requests VALUES (?, ?, 'scale', ?, '', ?, '', ?, NULL, '', '', NULL, ?, ?)",
                (job, number, role, is_forced, now, replicas, plan_to_json(plan)),
            )
            data = {"number": number, "request": "scale", "role": role, "replicas": replicas, "forced": is_forced}
            text = f"request {number}: scale {role} to {replicas}"
            note(connection, job, Event(kind="request_asked", text=text, data=data), now)
            return number

    def plan_of(self, job: str, number: int) -> JobPlan:
        """Of a request that scales a role. Raises `RecordUnreadable`."""
        query = "SELECT plan FROM replica_requests WHERE job = ? AND number = ?"
        with self._database.reading() as connection:
            return read_plan(job, connection.execute(query, (job, number)).fetchone()["plan"])

    def begin(self, job: str, number: int, now: float) -> None:
        """Before anything of it is done. One that was withdrawn is not begun."""
        with self._database.transaction() as connection:
            query = "UPDATE replica_requests SET begun_at = ? WHERE job = ? AND number = ? AND outcome = ''"
            connection.execute(query, (now, job, number))

    def end(self, job: str, request: ReplicaRequest, outcome: RequestOutcome, why: str, now: float) -> None:
        """One that has ended stays as it ended."""
        with self._database.transaction() as connection:
            _end(connection, job, request, "", outcome, why, now)

    def withdraw(self, request: ReplicaRequest, why: str, now: float) -> bool:
        """End a request that has not been begun; False where it was, or has ended."""
        with self._database.transaction() as connection:
            return _end(connection, request.job, request, "AND begun_at IS NULL", "cancelled", why, now)

    def requests(self, job: str) -> list[ReplicaRequest]:
        """Those of the job's present run that are kept, in their order."""
        with self._database.reading() as connection:
            return _requests(connection, job)

    def newest_of_outcome(self, outcome: str, job: str | None, limit: int) -> list[ReplicaRequest]:
        """Of one job, or of all; an empty outcome: those that have not ended. The newest first."""
        with self._database.reading() as connection:
            return [_request(row) for row in newest_of_outcome(connection, _REQUESTS, outcome, job, limit)]

    def request(self, job: str, number: int) -> ReplicaRequest:
        """Raises `RequestUnknown`."""
        query = f"{_REQUESTS} WHERE job = ? AND number = ?"
        with self._database.reading() as connection:
            # As text, which SQLite compares as a number: its own integers end, and what a caller asks for may not.
            row = connection.execute(query, (job, str(number))).fetchone()
        if row is None:
            raise RequestUnknown(f"job {job!r} has no request {number}")
        return _request(row)


def end_open_requests(connection: sqlite3.Connection, job: str, why: str, now: float) -> None:
    """In a transaction that ends the job's run."""
    for row in connection.execute(f"{_REQUESTS} WHERE job = ? AND outcome = ''", (job,)).fetchall():
        _end(connection, job, _request(row), "", "cancelled", why, now)


def drained(requests: Sequence[ReplicaRequest]) -> frozenset[str]:
    """The replicas that are to get no requests: those whose newest drain or undrain that was begun is a drain, and that
    were not removed since."""
    return frozenset(_drains(requests))


def _drains(requests: Sequence[ReplicaRequest]) -> dict[str, int]:
    """Who is drained, and by which request."""
    found: dict[str, int] = {}
    for request in (each for each in requests if each.begun_at is not None and each.outcome != "failed"):
        match request.kind:
            case "drain":
                found[request.unit] = request.number
            case "undrain":
                found.pop(request.unit, None)
            case "scale":
                found = {name: number for name, number in found.items() if not is_beyond(name, request)}
    return found


def is_beyond(replica: str, scale: ReplicaRequest) -> bool:
    """Whether a scaled role has no replica of this name any more."""
    role, _, index = replica.rpartition("-")
    return role == scale.unit and scale.replicas is not None and int(index) >= scale.replicas


_REQUESTS = (
    "SELECT job, run_id, number, kind, unit, why, is_forced, life, asked_at, begun_at, outcome, note, ended_at,"
    " replicas FROM replica_requests JOIN jobs ON name = job"
)
"""Without the plan, which is long."""


def _next_number(connection: sqlite3.Connection, job: str, run_id: str, about: str) -> int:
    """Raises `RequestRefused`."""
    if not is_in_phase(connection, job, run_id, SERVING):
        raise RequestRefused(f"job {job!r} does not serve any more, or is in another run")
    query = "SELECT number FROM replica_requests WHERE job = ? AND unit = ? AND outcome = ''"
    open_one = connection.execute(query, (job, about)).fetchone()
    if open_one is not None:
        raise RequestRefused(f"request {open_one['number']} about {about} has not ended yet")
    query = "SELECT COALESCE(MAX(number), 0) + 1 AS number FROM replica_requests WHERE job = ?"
    return int(connection.execute(query, (job,)).fetchone()["number"])


def _end(
    connection: sqlite3.Connection,
    job: str,
    request: ReplicaRequest,
    only: str,
    outcome: RequestOutcome,
    why: str,
    now: float,
) -> bool:
    """Whether it ends now; `only`: a further condition."""
    done = connection.execute(
        "UPDATE replica_requests SET outcome = ?, note = ?, ended_at = ?"
        f" WHERE job = ? AND number = ? AND outcome = '' {only}",
        (outcome, why, now, job, request.number),
    )
    if done.rowcount:
        text = f"request {request.number}: {request.kind} {request.unit}: {outcome}{': ' + why if why else ''}"
        data = {"number": request.number, "request": request.kind, "outcome": outcome}
        process = "" if request.kind == "scale" else request.unit
        note(connection, job, Event(kind="request_ended", text=text, process=process, data=data), now)
        _prune(connection, job)
    return done.rowcount > 0


def _prune(connection: sqlite3.Connection, job: str) -> None:
    requests = _requests(connection, job)
    ended = [each.number for each in requests if each.outcome is not None]
    old = set(ended[:-REQUESTS_KEPT]).difference(_drains(requests).values())
    query = "DELETE FROM replica_requests WHERE job = ? AND number = ?"
    connection.executemany(query, [(job, number) for number in old])


def _is_present(connection: sqlite3.Connection, job: str, run_id: str) -> bool:
    query = "SELECT 1 FROM jobs WHERE name = ? AND run_id = ?"
    return connection.execute(query, (job, run_id)).fetchone() is not None


def _requests(connection: sqlite3.Connection, job: str) -> list[ReplicaRequest]:
    query = f"{_REQUESTS} WHERE job = ? ORDER BY number"
    return [_request(row) for row in connection.execute(query, (job,))]


def _request(row: sqlite3.Row) -> ReplicaRequest:
    return ReplicaRequest(
        job=row["job"],
        run_id=row["run_id"],
        number=row["number"],
        kind=row["kind"],
        unit=row["unit"],
        why=row["why"],
        is_forced=bool(row["is_forced"]),
        life=row["life"],
        replicas=row["replicas"],
        asked_at=row["asked_at"],
        begun_at=row["begun_at"],
        outcome=row["outcome"] or None,
        note=row["note"],
        ended_at=row["ended_at"],
    )
