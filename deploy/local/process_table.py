"""What /proc says about processes: who they are, whether they live, whose they are.

The functions that parse are pure; those that read answer None for a process that is gone, because any
pid may vanish while it is read. `membership` decides on a snapshot from here; `signals` and `sockets` read
single processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "HEADRACE_RUN_ID"
UNIT_VARIABLE = "HEADRACE_UNIT"

_DEAD_STATES = frozenset("ZXx")
_STATE, _PPID, _SESSION, _THREADS, _START_TICKS = 0, 1, 3, 17, 19
"""Positions behind the command name; proc(5) counts the first of them as field 3."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One life of one process: a pid alone may be used again."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What a unit's environment says about where it belongs."""

    run_id: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Process:
    """One entry of the process table."""

    identity: Identity
    comm: str
    alive: bool
    ppid: int
    session: int
    marker: Marker | None
    """None where the environment holds none, was overwritten (setproctitle does so) or cannot be read."""


def parse_stat(text: str, marker: Marker | None) -> Process:
    """Read one /proc/PID/stat. The command name may hold spaces, parentheses and newlines."""
    opening, closing = text.index("("), text.rindex(")")
    fields = text[closing + 1 :].split()
    # A main thread that has ended shows Z while other threads of its process still run.
    dead = fields[_STATE] in _DEAD_STATES and int(fields[_THREADS]) <= 1
    return Process(
        identity=Identity(pid=int(text[:opening]), start_ticks=int(fields[_START_TICKS])),
        comm=text[opening + 1 : closing],
        alive=not dead,
        ppid=int(fields[_PPID]),
        session=int(fields[_SESSION]),
        marker=marker,
    )


def parse_marker(environ: bytes) -> Marker | None:
    """Find the marker in the bytes of /proc/PID/environ."""
    run_id = _variable(environ, RUN_ID_VARIABLE)
    unit = _variable(environ, UNIT_VARIABLE)
    return None if run_id is None or unit is None else Marker(run_id=run_id, unit=unit)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def all_pids() -> tuple[int, ...]:
    return tuple(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def read_process(pid: int) -> Process | None:
    """The process as it is now, or None if there is none (or none that may be read)."""
    try:
        with _process_folder(pid) as folder:
            marker = _read_marker(folder)
            text = _read(folder, "stat").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return parse_stat(text, marker)


def read_identity(pid: int) -> Identity | None:
    """Cheaper than `read_process`: the environment is not read."""
    process = _read_unmarked(pid)
    return None if process is None else process.identity


def is_alive(identity: Identity) -> bool:
    """As cheap as `read_identity`."""
    process = _read_unmarked(identity.pid)
    return process is not None and process.alive and process.identity == identity


def _read_unmarked(pid: int) -> Process | None:
    try:
        with _process_folder(pid) as folder:
            text = _read(folder, "stat").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return parse_stat(text, None)


def snapshot() -> dict[int, Process]:
    """Every process by pid. Not one instant: a process may begin or end while the table is read."""
    found = ((pid, read_process(pid)) for pid in all_pids())
    return {pid: process for pid, process in found if process is not None}


class SharedReading:
    """Snapshots for many threads: one reading serves all who asked before it began. Each sees the table as it was after
    its asking, and on a machine with many processes a reading takes long enough for many to ask."""

    def __init__(self) -> None:
        self._next = _Reading()
        self._changing, self._reading = threading.Lock(), threading.Lock()

    def __call__(self) -> Mapping[int, Process]:
        with self._changing:
            mine = self._next
        with self._reading:
            if mine.table is None:
                # Whoever asks from now on may have seen what this reading has not.
                with self._changing:
                    self._next = _Reading()
                mine.table = snapshot()
        return mine.table


@dataclass
class _Reading:
    table: Mapping[int, Process] | None = None


def _variable(environ: bytes, name: str) -> str | None:
    # Searched, not split: environments of a whole machine are read at every look.
    entries, key = b"\0" + environ + b"\0", b"\0" + name.encode() + b"="
    _, found, after = entries.partition(key)
    return after[: after.index(b"\0")].decode(errors="replace") if found else None


@contextmanager
def _process_folder(pid: int) -> Iterator[int]:
    # All reads through one open folder speak of one process, even if its pid is given away meanwhile.
    folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _read_marker(folder: int) -> Marker | None:
    try:
        return parse_marker(_read(folder, "environ"))
    except OSError:
        # Another user's process, or one that is about to end: its stat may still be read.
        return None
