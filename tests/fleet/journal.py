"""Stops a coordinator at a step of its journal.

A record is one transaction of the state's SQLite file, and commands follow it. Whoever holds the file's write lock lets
nothing more be recorded: so what is killed meanwhile has this step as its newest, and may or may not have sent its
commands.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from orchestrator.weights.words import Going, Phase

LOOK_EVERY_S = 0.0005
WAIT_S = 60.0


@contextmanager
def held_at(home: Path, update: int, phases: Sequence[Phase], going: Going = "forward") -> Iterator[dict[str, Any]]:
    """Nothing is recorded within the block, for a few seconds: who waits to write gives up after
    `database.BUSY_TIMEOUT_S`. Gives the update's course, in the first of these phases that was seen: one that asks
    nobody for anything may be over too soon."""
    with closing(sqlite3.connect(home / "headrace.db", timeout=0, isolation_level=None)) as database:
        course = _lock_at(database, update, phases, going)
        try:
            yield course
        finally:
            database.execute("ROLLBACK")


def _lock_at(database: sqlite3.Connection, update: int, phases: Sequence[Phase], going: Going) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    course: dict[str, Any] | None = None
    while time.monotonic() < deadline:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            # Somebody writes. Perhaps the record that is looked for, so there is no time to lose.
            continue
        course = _course_of(database, update)
        if course is not None and course["going"] == going and course["phase"] in phases:
            return course
        database.execute("ROLLBACK")
        time.sleep(LOOK_EVERY_S)
    raise AssertionError(f"update {update} was not seen going {going} in {phases}; now it is at {course}")


def next_phases(home: Path) -> list[tuple[Phase, float]]:
    """The phases of the next update that begins, and when each was recorded, on the monotonic clock, up to `purge`: by
    then it is over for all who wait. Blocking."""
    seen: list[tuple[Phase, float]] = []
    with closing(sqlite3.connect(home / "headrace.db", isolation_level=None)) as database:
        update = _position(database)["last_update"] + 1
        deadline = time.monotonic() + WAIT_S
        while not seen or seen[-1][0] != "purge":
            assert time.monotonic() < deadline, f"update {update} has not ended; seen: {seen}"
            course = _course_of(database, update)
            if course is not None and (not seen or seen[-1][0] != course["phase"]):
                seen.append((course["phase"], time.monotonic()))
            time.sleep(LOOK_EVERY_S)
    return seen


def _course_of(database: sqlite3.Connection, update: int) -> dict[str, Any] | None:
    course: dict[str, Any] | None = _position(database)["course"]
    return None if course is None or course["update"]["number"] != update else course


def _position(database: sqlite3.Connection) -> dict[str, Any]:
    (text,) = database.execute("SELECT position FROM weight_positions").fetchone()
    found: dict[str, Any] = json.loads(text)
    return found
