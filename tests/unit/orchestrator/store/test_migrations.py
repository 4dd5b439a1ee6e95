"""A state file comes to the tables of this version: from nothing or from the first version, and after a kill."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from orchestrator.store.database import SCHEMA, Database
from orchestrator.store.home import StateUnusable
from orchestrator.store.jobs import JobStore
from orchestrator.store.migrations import newest
from orchestrator.store.tables import TABLES
from orchestrator.store.updates import UpdateStore

FIRST_VERSION = """
CREATE TABLE jobs (
    name TEXT PRIMARY KEY, run_id TEXT NOT NULL, directory TEXT NOT NULL, socket_dir TEXT NOT NULL, plan TEXT NOT NULL,
    phase TEXT NOT NULL, reason TEXT NOT NULL, created_at REAL NOT NULL, phase_at REAL NOT NULL
);
CREATE TABLE units (
    job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE, run_id TEXT NOT NULL, name TEXT NOT NULL,
    node TEXT NOT NULL, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL, boot_id TEXT NOT NULL, log TEXT NOT NULL,
    started_at REAL NOT NULL, ready_at REAL, PRIMARY KEY (job, name)
);
CREATE TABLE weight_positions (
    job TEXT PRIMARY KEY REFERENCES jobs(name) ON DELETE CASCADE, run_id TEXT NOT NULL, generation INTEGER NOT NULL,
    position TEXT NOT NULL
);
CREATE TABLE weight_updates (
    job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE, number INTEGER NOT NULL, request TEXT NOT NULL,
    asked_at REAL NOT NULL, outcome TEXT NOT NULL, why TEXT NOT NULL, ended_at REAL, is_cancelled INTEGER NOT NULL,
    PRIMARY KEY (job, number)
);
CREATE TABLE weight_remarks (
    job TEXT NOT NULL REFERENCES jobs(name) ON DELETE CASCADE, at REAL NOT NULL, text TEXT NOT NULL
);
INSERT INTO jobs VALUES ('demo', 'run-1', '/jobs/demo', '/tmp/s',
    '{"units": [{"ports": [{"port": 8000}]}], "ports": {"router internal": [9000, 2]}}', 'ready', '', 1.5, 2.5);
INSERT INTO units VALUES ('demo', 'run-1', 'router', 'n0', 7, 70, 'boot', '/logs/router.log', 3.5, 4.5);
INSERT INTO weight_positions VALUES ('demo', 'run-1', 3, 'position');
INSERT INTO weight_updates VALUES ('demo', 1, 'request', 5.5, 'committed', '', 6.5, 0);
INSERT INTO weight_remarks VALUES ('demo', 7.5, 'a remark');
"""

ENDED = "the job has failed"
DIES_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from alembic import op
from orchestrator.store.database import Database
op.create_index = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
Database(Path(sys.argv[1]))
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder with a file of the first version, which knew no revisions."""
    with closing(sqlite3.connect(tmp_path / "headrace.db")) as connection:
        connection.executescript(FIRST_VERSION)
    return tmp_path


def tables(home: Path) -> set[str]:
    with closing(sqlite3.connect(home / "headrace.db")) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def is_whole(home: Path) -> None:
    """Nothing of what the first version recorded is lost."""
    database = Database(home)
    jobs, updates = JobStore(database), UpdateStore(database)
    job = jobs.get("demo")
    assert (job.run_id, job.phase, job.created_at, job.phase_at) == ("run-1", "ready", 1.5, 2.5)
    assert (job.opened_at, job.stop_asked_at) == (2.5, None)
    assert [(unit.record.pid, unit.record.start_ticks, unit.ready_at) for unit in job.units] == [(7, 70, 4.5)]
    assert jobs.reserved_ports(except_job="other") == {8000, 9000, 9001}
    assert updates.position("demo") == "position"
    assert [(each.number, each.outcome) for each in updates.updates("demo", 9)] == [(1, "committed")]
    assert [each.text for each in updates.remarks("demo")] == ["a remark"]


def test_the_revision_that_is_looked_for_is_the_newest() -> None:
    assert newest() == SCHEMA


def test_the_revisions_lead_to_the_tables_as_they_are_declared(tmp_path: Path) -> None:
    Database(tmp_path)
    engine = create_engine(f"sqlite:///{tmp_path / 'headrace.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), TABLES) == []
    engine.dispose()


def test_a_file_of_the_first_version_is_taken_over_as_it_is(old: Path) -> None:
    is_whole(old)
    assert set(TABLES.tables) <= tables(old)


@pytest.mark.parametrize(("phase", "ended"), [("ready", ("", "", None)), ("failed", ("cancelled", ENDED, 2.5))])
def test_what_was_open_when_its_run_ended_has_ended(
    old: Path, phase: str, ended: tuple[str, str, float | None]
) -> None:
    with closing(sqlite3.connect(old / "headrace.db")) as connection, connection:
        connection.execute("UPDATE jobs SET phase = ?", (phase,))
        connection.execute("INSERT INTO weight_updates VALUES ('demo', 2, 'request', 7.5, '', '', NULL, 0)")
    before, update = UpdateStore(Database(old)).updates("demo", 9)
    assert (before.outcome, before.why, before.ended_at) == ("committed", "", 6.5)
    assert (update.outcome, update.why, update.ended_at) == ended


def test_a_kill_in_the_middle_leaves_the_old_tables_and_the_next_start_goes_on(old: Path) -> None:
    before = tables(old)
    done = subprocess.run([sys.executable, "-c", DIES_HALF_WAY, str(old)], check=False, timeout=30)
    assert done.returncode == -9
    assert tables(old) == before
    is_whole(old)


def test_many_who_come_at_once_find_one_migration_done(old: Path) -> None:
    failures: list[Exception] = []
    together = threading.Barrier(6)

    def come() -> None:
        together.wait()
        try:
            is_whole(old)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=come) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    with Database(tmp_path).transaction() as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StateUnusable, match=r"another version of Headrace wrote it .*9999.*install that version again"):
        Database(tmp_path)
