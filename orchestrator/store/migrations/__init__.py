"""Brings a state file to the tables of this version: one revision after the other, all in one transaction.

`store/database.py` calls it where the file's revision is not the newest. SQLite changes tables within transactions, and
lets one process write at a time: so whoever is killed leaves the old tables, and whoever comes second finds the new.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from orchestrator.store.home import StateUnusable


def migrate(path: Path, timeout_s: float) -> None:
    """Raises `StateUnusable`: a newer version wrote the file, or it cannot be written now."""
    engine = create_engine(
        "sqlite://", poolclass=NullPool, creator=lambda: sqlite3.connect(path, timeout=timeout_s, isolation_level=None)
    )
    # Otherwise a transaction of the driver's begins at its first INSERT, behind the tables that were made before it.
    event.listen(engine, "begin", _begin)
    try:
        with engine.begin() as connection:
            config = configuration()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        mend = "install that version again"
        raise StateUnusable(path, f"another version of Headrace wrote it ({error})", mend) from error
    except DBAPIError as error:
        raise StateUnusable(path, error.orig) from error


def configuration() -> Config:
    """Of alembic. A percent sign in it would begin a name."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def newest() -> str | None:
    """The newest revision."""
    return ScriptDirectory.from_config(configuration()).get_current_head()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
