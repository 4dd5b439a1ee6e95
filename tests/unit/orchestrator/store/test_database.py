"""The file that must survive, and folders in which it cannot."""

from __future__ import annotations

import gc
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from orchestrator.store.database import Database
from orchestrator.store.home import StateUnusable


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_and_the_file_are_for_their_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    Database(home)
    assert mode(home) == 0o700
    assert mode(home / "headrace.db") == 0o600


def test_a_transaction_that_raises_leaves_no_trace(tmp_path: Path) -> None:
    database = Database(tmp_path)

    def half_a_change() -> None:
        with database.transaction() as connection:
            connection.execute("CREATE TABLE extra (x)")
            raise KeyError

    with pytest.raises(KeyError):
        half_a_change()
    with database.transaction() as connection:
        assert connection.execute("SELECT * FROM sqlite_master WHERE name = 'extra'").fetchall() == []


def test_a_wrong_statement_is_our_mistake_and_not_the_folders(tmp_path: Path) -> None:
    database = Database(tmp_path)
    with pytest.raises(sqlite3.IntegrityError), database.transaction() as connection:
        connection.execute("INSERT INTO jobs (name) VALUES (NULL)")


@pytest.mark.parametrize("obstacle", ["file", "database is a folder", "database is something else"])
def test_a_folder_that_cannot_be_used_is_named_with_its_mend(tmp_path: Path, obstacle: str) -> None:
    home = tmp_path / "home"
    if obstacle == "file":
        home.write_text("")
    else:
        home.mkdir()
        if obstacle == "database is a folder":
            (home / "headrace.db").mkdir()
        else:
            (home / "headrace.db").write_text("a text, and longer than the header of a database would be " * 9)
    with pytest.raises(StateUnusable, match=rf"{home}.* cannot be used: .*HEADRACE_HOME"):
        Database(home)


def test_a_damaged_file_and_a_full_one_have_mends_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "headrace.db").write_text("a text, and longer than the header of a database would be " * 9)
    with pytest.raises(StateUnusable, match=r"not a database; end the processes .* has HEADRACE_RUN_ID, and move the"):
        Database(tmp_path)
    (tmp_path / "headrace.db").unlink()
    database = Database(tmp_path)

    def fill() -> None:
        with database.transaction() as connection:
            connection.execute("PRAGMA max_page_count = 1")
            connection.execute("CREATE TABLE extra (x)")

    with pytest.raises(StateUnusable, match=r"is full; make room on its disk"):
        fill()


def test_whoever_reads_keeps_nobody_from_writing_and_sees_nothing_of_it(tmp_path: Path) -> None:
    reader, writer = Database(tmp_path), Database(tmp_path)
    with reader.reading() as connection:
        before = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        with writer.transaction() as other:
            other.execute("CREATE TABLE extra (x)")
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == before
    with reader.reading() as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == before + 1


def test_a_state_folder_of_a_process_that_ended_is_one_file(tmp_path: Path) -> None:
    database = Database(tmp_path)
    assert (tmp_path / "headrace.db-wal").exists()
    del database
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["headrace.db"]


def test_many_transactions_in_many_threads(tmp_path: Path) -> None:
    database = Database(tmp_path)
    with database.transaction() as connection:
        connection.execute("CREATE TABLE counts (n)")
        connection.execute("INSERT INTO counts VALUES (0)")

    def add() -> None:
        for _ in range(20):
            with database.transaction() as connection:
                connection.execute("UPDATE counts SET n = n + 1")

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.reading() as connection:
        assert connection.execute("SELECT n FROM counts").fetchone()[0] == 160
