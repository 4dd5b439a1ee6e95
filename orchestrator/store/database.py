"""The SQLite file that holds what must survive: jobs, the processes started for them, and updates of their weights.

One file under HEADRACE_HOME, shared by the CLI and the control API; every change is one transaction, so that two of
them at once see either all of it or nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import HeadraceError

SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS jobs (
        name TEXT PRIMARY KEY,
        run_id TEXT NOT NULL,
        directory TEXT NOT NULL,
        socket_dir TEXT NOT NULL,
        plan TEXT NOT NULL,
        phase TEXT NOT NULL,
        reason TEXT NOT NULL,
        created_at REAL NOT NULL,
        phase_at REAL NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS units (
        job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE,
        run_id TEXT NOT NULL,
        name TEXT NOT NULL,
        node TEXT NOT NULL,
        pid INTEGER NOT NULL,
        start_ticks INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        log TEXT NOT NULL,
        started_at REAL NOT NULL,
        ready_at REAL,
        PRIMARY KEY (job, name)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS weight_positions (
        job TEXT PRIMARY KEY REFERENCES jobs(name) ON DELETE CASCADE,
        run_id TEXT NOT NULL,
        generation INTEGER NOT NULL,
        position TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS weight_updates (
        job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        request TEXT NOT NULL,
        asked_at REAL NOT NULL,
        outcome TEXT NOT NULL,
        why TEXT NOT NULL,
        ended_at REAL,
        is_cancelled INTEGER NOT NULL,
        PRIMARY KEY (job, number)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS weight_remarks (
        job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE,
        at REAL NOT NULL,
        text TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS unit_ends (
        job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE,
        unit TEXT NOT NULL,
        life TEXT NOT NULL,
        at REAL NOT NULL,
        ready_s REAL NOT NULL,
        cause TEXT NOT NULL,
        PRIMARY KEY (job, unit, life)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS replica_requests (
        job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        kind TEXT NOT NULL,
        unit TEXT NOT NULL,
        why TEXT NOT NULL,
        is_forced INTEGER NOT NULL,
        life TEXT NOT NULL,
        asked_at REAL NOT NULL,
        begun_at REAL,
        outcome TEXT NOT NULL,
        note TEXT NOT NULL,
        ended_at REAL,
        PRIMARY KEY (job, number)
    )
    """,
)
BUSY_TIMEOUT_S = 10.0


class StateUnusable(HeadraceError):
    """The state folder, or a file in it, cannot be read or written: the user mends it or names another folder."""

    def __init__(self, path: Path, cause: object) -> None:
        mend = "make the folder readable and writable, or set HEADRACE_HOME to another one"
        super().__init__(f"the state in {path} cannot be used: {cause}; {mend}")


def home_folder() -> Path:
    """HEADRACE_HOME, else the XDG state folder."""
    named = os.environ.get("HEADRACE_HOME")
    if named:
        return Path(named).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "headrace"


class Database:
    """Opens a connection per transaction: callers may live in any thread or process.

    Raises:
        StateUnusable: the folder or the file cannot be used; so do all transactions.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._path = home / "headrace.db"
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Plans hold the environment of engines, which may hold secrets.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StateUnusable(home, error.strerror or error) from error
        with self.transaction() as connection:
            for statement in SCHEMA:
                connection.execute(statement)

    def connect(self) -> sqlite3.Connection:
        """A connection outside any transaction, for its caller to close."""
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        # What is recorded before an act has to be on the disk before it, a power cut included.
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction; committed at the end, rolled back on an exception."""
        connection: sqlite3.Connection | None = None
        try:
            connection = self.connect()
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            # Its other kinds speak of a statement that is wrong, which is our mistake.
            if type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError):
                raise StateUnusable(self._path, error) from error
            raise
        finally:
            # A connection that is closed before its COMMIT rolls back.
            if connection is not None:
                connection.close()
