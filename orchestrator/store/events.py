"""What happened to jobs, numbered in the order of its recording, for whoever looks on.

`jobs.py` and `updates.py` write an event in the transaction of what it tells of; what changes no record is noted alone.
Events outlive the run of a job that they tell of. No event holds a secret: neither environments nor sources of weights
nor a log's lines but the one that says why a process ended.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from orchestrator.store.database import Database

EventKind = Literal[
    "job_phase",
    "job_adopted",
    "job_replanned",
    "process_started",
    "process_restarted",
    "process_ready",
    "process_ended",
    "process_given_up",
    "process_removed",
    "request_asked",
    "request_ended",
    "update_asked",
    "update_cancel_asked",
    "update_phase",
    "update_ended",
    "version_committed",
    "gate",
    "engine_joined",
    "engine_fenced",
    "remark",
]
"""process_given_up: it ended too often. process_removed: the plan has it no more. request_*: a restart or drain of one
process, or a scaled role. job_adopted: a process goes on with a job that it did not find at its beginning.
job_replanned: a role has another number of replicas. update_phase: also of engines that join. engine_joined: the router
may send it requests. engine_fenced: it takes none. remark: for a person to know."""
KEPT_PER_JOB = 10_000
KEPT_S = 30 * 24 * 3600.0
PRUNED_EVERY = 257
"""Events, those of all jobs counted. A prime: jobs that take turns at writing all come to be pruned."""
PRUNED_BY_AGE = 1000
"""At most so many at once."""
LONGEST_TEXT = 500
_KINDS = ", ".join(f"'{kind}'" for kind in get_args(EventKind))
_IS_KNOWN = f"kind IN ({_KINDS})"
"""Another version may have noted other kinds. They are left out: one must not hide all others."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something to be noted."""

    kind: EventKind
    text: str
    process: str = ""
    """Which it is about; empty for the whole job."""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    seq: int
    """The cursor: grows over all jobs, and none is given twice."""
    at: float
    """Unix time."""
    job: str
    event: Event


class EventStore:
    """Of all jobs; every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, job: str, event: Event) -> None:
        """Note what changes no record. A power cut may take it away, a kill does not."""
        with self._database.noting() as connection:
            note(connection, job, event, time.time())

    def since(self, seq: int, limit: int, job: str | None = None) -> list[StoredEvent]:
        """The first of those behind a cursor, in their order; of one job, or of all."""
        of_job = "" if job is None else "job = :job AND"
        query = f"SELECT * FROM events WHERE {of_job} {_IS_KNOWN} AND seq > :seq ORDER BY seq LIMIT :limit"
        with self._database.reading() as connection:
            return [_event(row) for row in connection.execute(query, {"job": job, "seq": seq, "limit": limit})]

    def newest(self, limit: int, job: str | None = None) -> list[StoredEvent]:
        """In their order."""
        of_job = "" if job is None else "job = :job AND"
        query = f"SELECT * FROM events WHERE {of_job} {_IS_KNOWN} ORDER BY seq DESC LIMIT :limit"
        with self._database.reading() as connection:
            return [_event(row) for row in connection.execute(query, {"job": job, "limit": limit})][::-1]

    def newest_seq(self) -> int:
        """A cursor behind all there are."""
        with self._database.reading() as connection:
            return int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])


def note(connection: sqlite3.Connection, job: str, event: Event, now: float) -> None:
    """Note an event in a transaction that writes."""
    done = connection.execute(
        "INSERT INTO events (at, job, process, kind, text, data) VALUES (?, ?, ?, ?, ?, ?)",
        (now, job, event.process, event.kind, event.text[:LONGEST_TEXT], json.dumps(dict(event.data))),
    )
    assert done.lastrowid is not None
    if done.lastrowid % PRUNED_EVERY == 0:
        _prune(connection, job, now)


def _prune(connection: sqlite3.Connection, job: str, now: float) -> None:
    connection.execute(
        "DELETE FROM events WHERE job = ?1 AND seq <="
        " (SELECT seq FROM events WHERE job = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
        (job, KEPT_PER_JOB),
    )
    connection.execute(
        "DELETE FROM events WHERE at < ? AND seq < (SELECT min(seq) FROM events) + ?", (now - KEPT_S, PRUNED_BY_AGE)
    )


def _event(row: sqlite3.Row) -> StoredEvent:
    event = Event(kind=row["kind"], text=row["text"], process=row["process"], data=json.loads(row["data"]))
    return StoredEvent(seq=row["seq"], at=row["at"], job=row["job"], event=event)
