"""The SQLite file that holds what must survive: jobs, the processes started for them, updates of their weights, events.

One file under HEADRACE_HOME, shared by the CLI and the control API; every change is one transaction, so that two of
them at once see either all of it or nothing. `tables.py` says what is in it. What is asked of it is written in SQL here
and beside: SQLAlchemy, which declares and migrates the tables, takes longer to import than most commands run.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.local.process_table import RUN_ID_VARIABLE
from orchestrator.store.home import StateUnusable, refuse_network_file_system

SCHEMA = "0007"
"""The newest revision in `migrations/versions`."""
BUSY_TIMEOUT_S = 10.0


def database_file(home: Path) -> Path:
    return home / "headrace.db"


class Database:
    """Lends a connection to each transaction: callers may live in any thread or process.

    Raises:
        StateUnusable: the folder or the file cannot be used; so do all transactions.
    """

    synchronous = "FULL"
    """What is recorded before an act has to be on the disk before it, a power cut included."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._path = database_file(home)
        self._idle: list[sqlite3.Connection] = []
        """Kept open: the last one that closes ends the write-ahead log, and that takes three writes to the disk."""
        weakref.finalize(self, _close_all, self._idle)
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            refuse_network_file_system(home)
            # Plans hold the environment of engines, which may hold secrets.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StateUnusable(home, error.strerror or error) from error
        with self._lent() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            schema = _schema(connection)
        if schema != SCHEMA:
            self._migrate()

    def connect(self) -> sqlite3.Connection:
        """A connection outside any transaction, for its caller to close."""
        # Never by two threads at once, but by another thread each time.
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA synchronous = {self.synchronous}")
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes; committed at the end, rolled back on an exception. One at a time, of all."""
        with self._lent() as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def noting(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes what nothing depends on: it does not wait for the disk."""
        with self._lent() as connection:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
            connection.execute(f"PRAGMA synchronous = {self.synchronous}")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees the file as it was at its first question, and keeps nobody from writing."""
        with self._lent() as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _lent(self) -> Iterator[sqlite3.Connection]:
        connection: sqlite3.Connection | None = None
        try:
            # No look before it: another thread may take the last one in between.
            with suppress(IndexError):
                connection = self._idle.pop()
            connection = connection or self.connect()
            yield connection
            self._idle.append(connection)
            connection = None
        except sqlite3.DatabaseError as error:
            # Its other kinds speak of a statement that is wrong, which is our mistake.
            if type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError):
                raise _unusable(self._path, error) from error
            raise
        finally:
            # A connection that is closed before its COMMIT rolls back.
            if connection is not None:
                connection.close()

    def _migrate(self) -> None:
        # Needed once in the life of a version, and slow to import.
        from orchestrator.store.migrations import migrate

        migrate(self._path, BUSY_TIMEOUT_S)


def is_in_phase(connection: sqlite3.Connection, job: str, run_id: str, phases: Sequence[str]) -> bool:
    """Whether a job is in this run, and in one of these phases."""
    query = f"SELECT 1 FROM jobs WHERE name = ? AND run_id = ? AND phase IN ({', '.join('?' * len(phases))})"
    return connection.execute(query, (job, run_id, *phases)).fetchone() is not None


def newest_of_outcome(
    connection: sqlite3.Connection, select: str, outcome: str, job: str | None, limit: int
) -> list[sqlite3.Row]:
    """Of one job, or of all; an empty outcome: those that have not ended. The newest first. `select`: a query up to its
    WHERE, of rows that have `job`, `number`, `outcome` and `asked_at`."""
    # The plus keeps a job's own from being looked for among those of all jobs.
    of = "outcome = :outcome ORDER BY asked_at" if job is None else "job = :job AND +outcome = :outcome ORDER BY number"
    query = f"{select} WHERE {of} DESC LIMIT :limit"
    return connection.execute(query, {"job": job, "outcome": outcome, "limit": limit}).fetchall()


def _unusable(path: Path, error: sqlite3.DatabaseError) -> StateUnusable:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
            mend = f"end the processes of its jobs, whose environment has {RUN_ID_VARIABLE}, and move the file away"
        case sqlite3.SQLITE_FULL:
            mend = "make room on its disk"
        case sqlite3.SQLITE_IOERR:
            mend = "see whether its disk is full or failing"
        case _:
            return StateUnusable(path, error)
    return StateUnusable(path, error, mend)


def _schema(connection: sqlite3.Connection) -> str:
    """Empty for a file that no migration has seen."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone() is None:
        return ""
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return "" if row is None else str(row["version_num"])


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()
