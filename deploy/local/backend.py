"""Runs units as processes of this machine.

The orchestrator calls it with the planner's `LaunchUnit`s and keeps the `UnitRecord`s it answers with. What a unit's
processes are is decided in `membership`, on what `process_table` reads; `sockets` tells who holds a port.
Every look is taken afresh from the kernel, so another process, given the records, goes on where this one died.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.errors import PortTaken, ProgramMissing, StartFailed
from deploy.local.files import make_private_folder, open_for_append, write_file
from deploy.local.membership import UnitTrace, lineage, look_again, members_of, strays_of
from deploy.local.process_table import Identity, Marker, Process, boot_id, is_alive, read_identity, snapshot
from deploy.local.request import child_environment, log_path
from deploy.local.signals import send_signal
from deploy.local.sockets import SocketEntry, find_holder, read_sockets
from deploy.unit import LaunchUnit, PlannedFile, PortRange, RunContext, UnitRecord, UnitStatus

_KILL_LIMIT_S = 5.0
"""How long a killed process may take to disappear before it is reported as not ended."""
_LOOK_INTERVAL_S = 0.05


Children = dict[Identity, subprocess.Popen[bytes]]
"""Units that this process has started: it alone hears how they end."""


class LocalBackend:
    """Implements `deploy.backend.Backend` with subprocesses."""

    def __init__(
        self, read_table: Callable[[], Mapping[int, Process]] = snapshot, children: Children | None = None
    ) -> None:
        """`children`: shared with the other backends of this process, which then know exit codes of each other's."""
        self._read_table = read_table
        self._children: Children = {} if children is None else children
        self._traces: dict[tuple[str, UnitRecord], UnitTrace] = {}

    def prepare(self, run: RunContext, units: Sequence[LaunchUnit], files: Sequence[PlannedFile]) -> None:
        sockets = read_sockets()
        for unit in units:
            _check_ports(unit, sockets)
        for unit in units:
            _check_program(run, unit)
        if run.private_dir is not None:
            make_private_folder(run.private_dir)
        for file in files:
            write_file(file)

    def start(self, run: RunContext, unit: LaunchUnit) -> UnitRecord:
        log = log_path(run, unit)
        environment = child_environment(os.environ, run, unit)
        with open_for_append(log) as output:
            try:
                child = subprocess.Popen(
                    unit.argv,
                    env=environment,
                    cwd=unit.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise _start_failure(unit, environment, error) from error
        identity = read_identity(child.pid)
        if identity is None:
            raise StartFailed(
                unit=unit.name,
                program=unit.argv[0],
                cause="it was gone before it could be recorded",
                mend="do not ignore SIGCHLD in the process that launches",
            )
        self._children[identity] = child
        return UnitRecord(
            name=unit.name,
            node=unit.node,
            pid=identity.pid,
            start_ticks=identity.start_ticks,
            boot_id=boot_id(),
            log=log,
        )

    def poll(self, run: RunContext, records: Sequence[UnitRecord]) -> dict[str, UnitStatus]:
        table = self._read_table()
        return {record.name: self._status(run, record, table) for record in records}

    def alive(self, records: Sequence[UnitRecord]) -> frozenset[UnitRecord]:
        boot = boot_id()
        return frozenset(record for record in records if record.boot_id == boot and is_alive(_leader(record)))

    def stop(self, run: RunContext, records: Sequence[UnitRecord], grace_s: float) -> tuple[int, ...]:
        def find() -> frozenset[Identity]:
            table = self._read_table()
            return frozenset[Identity]().union(*(self._look(run, record, table) for record in records))

        left = _end(find, grace_s)
        for record in records:
            self._exit_code(record)
        return left

    def sweep(self, run: RunContext, records: Sequence[UnitRecord], grace_s: float) -> tuple[int, ...]:
        def find() -> frozenset[Identity]:
            table = self._read_table()
            recorded = {member.pid for record in records for member in self._look(run, record, table)}
            return strays_of(run.run_id, table, recorded | lineage(os.getpid(), table))

        return _end(find, grace_s)

    def _status(self, run: RunContext, record: UnitRecord, table: Mapping[int, Process]) -> UnitStatus:
        members = self._look(run, record, table)
        alive = _leader(record) in members
        return UnitStatus(
            name=record.name,
            alive=alive,
            members=tuple(sorted(member.pid for member in members)),
            exit_code=None if alive else self._exit_code(record),
        )

    def _look(self, run: RunContext, record: UnitRecord, table: Mapping[int, Process]) -> frozenset[Identity]:
        """The living members of a unit. They are remembered, so that one which hides later is still known."""
        if record.boot_id != boot_id():
            return frozenset()
        fresh = UnitTrace(marker=Marker(run_id=run.run_id, unit=record.name), leader=_leader(record))
        trace = self._traces.get((run.run_id, record), fresh)
        members = members_of(trace, table, lineage(os.getpid(), table))
        self._traces[run.run_id, record] = look_again(trace, table, members)
        return members

    def _exit_code(self, record: UnitRecord) -> int | None:
        """Known only to the parent; asking also frees the process table's entry of a child that has ended."""
        child = self._children.get(_leader(record))
        return None if child is None else child.poll()


def _leader(record: UnitRecord) -> Identity:
    return Identity(pid=record.pid, start_ticks=record.start_ticks)


def _end(find: Callable[[], frozenset[Identity]], grace_s: float) -> tuple[int, ...]:
    """SIGTERM to all that `find` finds, SIGKILL to what is left after `grace_s`; the pids that are left then."""
    asked: set[Identity] = set()
    now = time.monotonic()
    grace_ends, killing_ends = now + grace_s, now + grace_s + _KILL_LIMIT_S
    empty_looks = 0
    while True:
        found = find()
        empty_looks = 0 if found else empty_looks + 1
        # One empty look is no proof: a parent can fork while the table is read, and end before its own line is.
        if empty_looks == 2:
            return ()
        now = time.monotonic()
        if now >= killing_ends:
            return tuple(sorted(target.pid for target in found))
        if now >= grace_ends:
            for target in found:
                send_signal(target, signal.SIGKILL)
        else:
            for target in found - asked:
                send_signal(target, signal.SIGTERM)
            asked |= found
        time.sleep(_LOOK_INTERVAL_S)


def _check_ports(unit: LaunchUnit, sockets: Sequence[SocketEntry]) -> None:
    for planned in unit.ports:
        taken = find_holder(planned.port, sockets, setting=planned.setting)
        if taken is not None:
            raise PortTaken(
                port=planned.port, purpose=planned.name, unit=unit.name, holder=taken.holder, mend=taken.mend
            )
    for span in unit.port_ranges:
        _check_range(unit, span, sockets)


def _check_range(unit: LaunchUnit, span: PortRange, sockets: Sequence[SocketEntry]) -> None:
    """A range is taken once too few of its ports are free; its first holder is named."""
    holders = {
        port: taken
        for port in range(span.first, span.first + span.count)
        if (taken := find_holder(port, sockets, setting=span.setting)) is not None
    }
    if span.count - len(holders) < span.needed:
        port, taken = next(iter(holders.items()))
        purpose = f"{span.name}, {span.needed} of {span.first}-{span.first + span.count - 1} must be free"
        raise PortTaken(port=port, purpose=purpose, unit=unit.name, holder=taken.holder, mend=taken.mend)


def _check_program(run: RunContext, unit: LaunchUnit) -> None:
    program = unit.argv[0]
    if "/" not in program:
        search_path = child_environment(os.environ, run, unit).get("PATH", os.defpath)
        if shutil.which(program, path=search_path) is None:
            raise ProgramMissing(
                unit=unit.name,
                program=program,
                cause=f"is on no folder of PATH ({search_path})",
                mend="install it there or give its absolute path",
            )
        return
    path = Path(program)
    if not path.is_absolute():
        cause, mend = "is a relative path", "give its absolute path"
    elif not path.is_file():
        cause, mend = "does not exist", "install it or correct the path"
    elif not os.access(path, os.X_OK):
        cause, mend = "is not executable", f"chmod +x {path}, or name another program"
    else:
        return
    raise ProgramMissing(unit=unit.name, program=program, cause=cause, mend=mend)


def _start_failure(unit: LaunchUnit, environment: Mapping[str, str], error: OSError) -> StartFailed:
    program = unit.argv[0]
    if unit.cwd is not None and not unit.cwd.is_dir():
        cause, mend = f"its folder {unit.cwd} does not exist", "make it"
    elif isinstance(error, FileNotFoundError) and shutil.which(program, path=environment.get("PATH")):
        cause, mend = "the interpreter named in its first line is missing", "install the program again"
    elif isinstance(error, BlockingIOError):
        cause, mend = "no more processes are allowed", "raise `ulimit -u` or the container's pids limit"
    else:
        cause, mend = error.strerror or str(error), "run the same command by hand to see more"
    return StartFailed(unit=unit.name, program=program, cause=cause, mend=mend)
