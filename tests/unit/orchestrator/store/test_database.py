"""The file that must survive, and folders in which it cannot."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from orchestrator.store.database import Database, StateUnusable, home_folder


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


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HEADRACE_HOME": "/data/headrace"}, "/data/headrace"),
        ({"HEADRACE_HOME": "", "XDG_STATE_HOME": "/state"}, "/state/headrace"),
        ({"HOME": "/home/u"}, "/home/u/.local/state/headrace"),
    ],
)
def test_home_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("HEADRACE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert home_folder() == Path(folder)
