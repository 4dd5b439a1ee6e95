"""Updates of a job's weights, as asked for and as far as they are: what a coordinator goes on from after any crash.

Texts in and out; `orchestrator/weights/journal.py` knows what stands in them. Each coordinator that begins gets a
higher generation, and a record of an older one is refused: so none sends a command of an attempt that is not its own.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import HeadraceError, UpdateRefused
from orchestrator.store.database import Database, is_in_phase, newest_of_outcome
from orchestrator.store.events import Event, EventStore, note
from orchestrator.store.records import SERVING

REMARKS_KEPT = 200
"""Per job."""


class CoordinatorReplaced(HeadraceError):
    """Another coordinator has taken the job over, or its run is over: this one must not act any more."""


@dataclass(frozen=True, kw_only=True)
class EndedUpdate:
    number: int
    outcome: str
    why: str
    at: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class StoredUpdate:
    """One update that somebody asked for."""

    job: str
    run_id: str
    number: int
    """From 1 up within a run of the job."""
    request: str
    asked_at: float
    """Unix time."""
    outcome: str
    """Empty while it has not ended."""
    why: str
    ended_at: float | None
    is_cancelled: bool
    """Somebody has asked that it ends."""
    begun_at: float | None


@dataclass(frozen=True, kw_only=True)
class StoredRemark:
    """Something that a person should know of a job's weights."""

    text: str
    at: float
    """Unix time."""


class UpdateStore:
    """Of all jobs; every method is one transaction. What belongs to an earlier run went with that run's record."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.events = EventStore(database)

    def take_over(self, job: str, run_id: str) -> int:
        """The generation of a coordinator that begins now.

        Raises:
            CoordinatorReplaced: the job is in another run.
        """
        with self._database.transaction() as connection:
            if connection.execute("SELECT 1 FROM jobs WHERE name = ? AND run_id = ?", (job, run_id)).fetchone() is None:
                raise CoordinatorReplaced(f"job {job!r} is in another run")
            connection.execute(
                "INSERT INTO weight_positions VALUES (?, ?, 1, '')"
                " ON CONFLICT (job) DO UPDATE SET generation = generation + 1",
                (job, run_id),
            )
            query = "SELECT generation FROM weight_positions WHERE job = ?"
            return int(connection.execute(query, (job,)).fetchone()["generation"])

    def position(self, job: str) -> str:
        """The newest record; empty before the first."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT position FROM weight_positions WHERE job = ?", (job,)).fetchone()
            return "" if row is None else str(row["position"])

    def record(
        self,
        job: str,
        run_id: str,
        generation: int,
        position: str,
        ended: EndedUpdate | None,
        events: Sequence[Event] = (),
        begun: int | None = None,
    ) -> None:
        """Put a record in the place of the one before, with how an update ended, and which one it begins; said again,
        both stay as they were said first. It is on the disk when this returns, and so are the events that tell of it.

        Raises:
            CoordinatorReplaced: a coordinator of a higher generation has begun.
        """
        with self._database.transaction() as connection:
            _refuse_overtaken(connection, job, run_id, generation)
            connection.execute("UPDATE weight_positions SET position = ? WHERE job = ?", (position, job))
            for event in events:
                note(connection, job, event, time.time())
            if begun is not None:
                query = "UPDATE weight_updates SET begun_at = ? WHERE job = ? AND number = ? AND begun_at IS NULL"
                connection.execute(query, (time.time(), job, begun))
            if ended is not None:
                _end(connection, job, ended)

    def ask(self, job: str, run_id: str, request: str, now: float) -> int:
        """Note an update that somebody wants of a run; its number.

        Raises:
            UpdateRefused: one has not ended yet, or the run does not serve any more.
        """
        with self._database.transaction() as connection:
            if not is_in_phase(connection, job, run_id, SERVING):
                raise UpdateRefused(f"job {job!r} does not serve any more, or is in another run")
            query = "SELECT number, outcome FROM weight_updates WHERE job = ? ORDER BY number DESC LIMIT 1"
            last = connection.execute(query, (job,)).fetchone()
            if last is not None and not last["outcome"]:
                raise UpdateRefused(f"update {last['number']} of job {job!r} is under way: wait for its end")
            number = 1 if last is None else int(last["number"]) + 1
            connection.execute(
                "INSERT INTO weight_updates VALUES (?, ?, ?, ?, '', '', NULL, 0, NULL)", (job, number, request, now)
            )
            text = f"update {number} was asked for"
            note(connection, job, Event(kind="update_asked", text=text, data={"update": number}), now)
            return number

    def cancel(self, job: str, number: int) -> None:
        """Note that an update is no longer wanted. One that has ended stays as it is."""
        query = (
            "UPDATE weight_updates SET is_cancelled = 1"
            " WHERE job = ? AND number = ? AND outcome = '' AND is_cancelled = 0"
        )
        with self._database.transaction() as connection:
            if connection.execute(query, (job, number)).rowcount:
                text = f"somebody asked that update {number} ends"
                event = Event(kind="update_cancel_asked", text=text, data={"update": number})
                note(connection, job, event, time.time())

    def end(self, job: str, run_id: str, generation: int, ended: EndedUpdate) -> None:
        """For one that was never begun: no record tells of it.

        Raises:
            CoordinatorReplaced: a coordinator of a higher generation has begun, and may have begun this as well.
        """
        with self._database.transaction() as connection:
            _refuse_overtaken(connection, job, run_id, generation)
            _end(connection, job, ended)

    def updates(self, job: str, limit: int) -> list[StoredUpdate]:
        """The newest of the job's present run, in their order."""
        query = f"{_UPDATES} WHERE job = ? ORDER BY number DESC LIMIT ?"
        with self._database.reading() as connection:
            return [_update(row) for row in connection.execute(query, (job, limit))][::-1]

    def update(self, job: str, number: int) -> StoredUpdate | None:
        """None where the job's present run has none of this number."""
        query = f"{_UPDATES} WHERE job = ? AND number = ?"
        with self._database.reading() as connection:
            # As text, which SQLite compares as a number: its own integers end, and what a caller asks for may not.
            row = connection.execute(query, (job, str(number))).fetchone()
            return None if row is None else _update(row)

    def newest(self, job: str) -> StoredUpdate | None:
        """The only one that can have no end yet. None where the job's present run has had none."""
        return next(iter(self.updates(job, 1)), None)

    def newest_of_outcome(self, outcome: str, job: str | None, limit: int) -> list[StoredUpdate]:
        """Of one job, or of all; an empty outcome: those that have not ended. The newest first."""
        with self._database.reading() as connection:
            return [_update(row) for row in newest_of_outcome(connection, _UPDATES, outcome, job, limit)]

    def remark(self, job: str, remark: StoredRemark) -> None:
        """Only the newest are kept: a step that must succeed is remarked upon until it does."""
        with self._database.transaction() as connection:
            connection.execute("INSERT INTO weight_remarks VALUES (?, ?, ?)", (job, remark.at, remark.text))
            note(connection, job, Event(kind="remark", text=remark.text), remark.at)
            connection.execute(
                "DELETE FROM weight_remarks WHERE job = ?1 AND rowid NOT IN"
                " (SELECT rowid FROM weight_remarks WHERE job = ?1 ORDER BY rowid DESC LIMIT ?2)",
                (job, REMARKS_KEPT),
            )

    def remarks(self, job: str) -> list[StoredRemark]:
        """Of the job's present run, in their order."""
        query = "SELECT text, at FROM weight_remarks WHERE job = ? ORDER BY rowid"
        with self._database.reading() as connection:
            return [StoredRemark(text=row["text"], at=row["at"]) for row in connection.execute(query, (job,))]


def end_open_updates(connection: sqlite3.Connection, job: str, why: str, now: float) -> None:
    """In a transaction that ends the job's run."""
    query = "SELECT number FROM weight_updates WHERE job = ? AND outcome = ''"
    for row in connection.execute(query, (job,)).fetchall():
        _end(connection, job, EndedUpdate(number=row["number"], outcome="cancelled", why=why, at=now))


_UPDATES = "SELECT weight_updates.*, run_id FROM weight_updates JOIN jobs ON name = job"


def _refuse_overtaken(connection: sqlite3.Connection, job: str, run_id: str, generation: int) -> None:
    query = "SELECT 1 FROM weight_positions WHERE job = ? AND run_id = ? AND generation = ?"
    if connection.execute(query, (job, run_id, generation)).fetchone() is None:
        raise CoordinatorReplaced(f"another coordinator has taken job {job!r} over")


def _update(row: sqlite3.Row) -> StoredUpdate:
    return StoredUpdate(
        job=row["job"],
        run_id=row["run_id"],
        number=row["number"],
        request=row["request"],
        asked_at=row["asked_at"],
        outcome=row["outcome"],
        why=row["why"],
        ended_at=row["ended_at"],
        is_cancelled=bool(row["is_cancelled"]),
        begun_at=row["begun_at"],
    )


def _end(connection: sqlite3.Connection, job: str, ended: EndedUpdate) -> None:
    done = connection.execute(
        "UPDATE weight_updates SET outcome = ?, why = ?, ended_at = ? WHERE job = ? AND number = ? AND outcome = ''",
        (ended.outcome, ended.why, ended.at, job, ended.number),
    )
    if done.rowcount:
        text = f"update {ended.number}: {ended.outcome}{f': {ended.why}' if ended.why else ''}"
        data = {"update": ended.number, "outcome": ended.outcome}
        note(connection, job, Event(kind="update_ended", text=text, data=data), ended.at)
