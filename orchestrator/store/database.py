"""The SQLite file that holds what must survive: jobs and the processes started for them.

One file under HEADRACE_HOME, shared by the CLI and the control API; every change is one transaction, so that two of
them at once see either all of it or nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCHEMA = """
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
);
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
);
"""
BUSY_TIMEOUT_S = 10.0


def home_folder() -> Path:
    """HEADRACE_HOME, else the XDG state folder."""
    named = os.environ.get("HEADRACE_HOME")
    if named:
        return Path(named).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "headrace"


class Database:
    """Opens a connection per transaction: callers may live in any thread or process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = home / "headrace.db"
        with self.transaction() as connection:
            connection.executescript(SCHEMA)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction; committed at the end, rolled back on an exception."""
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            if connection.in_transaction:
                connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        finally:
            connection.close()
