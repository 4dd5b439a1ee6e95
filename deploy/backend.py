"""The interface of every launch backend. `orchestrator/compose.py` chooses one; see `deploy/local/backend.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deploy.unit import LaunchUnit, PlannedFile, RunContext, UnitRecord, UnitStatus


class Backend(Protocol):
    """Starts, watches and ends units. Blocking calls; one run at a time per instance."""

    def prepare(self, run: RunContext, units: Sequence[LaunchUnit], files: Sequence[PlannedFile]) -> None:
        """Check that every planned port is free and every program exists, then make the run's private folder and write
        the files. Starts nothing.

        Raises:
            deploy.errors.PortTaken: names the port, its purpose, the unit it was planned for and, where it
                can be read, the process that holds it.
            deploy.errors.ProgramMissing: names the unit and the program.
            deploy.errors.FileNotWritten: names the path.
            deploy.errors.FolderNotOurs: the private folder is there, and others can change what is in it.
        """
        ...

    def start(self, run: RunContext, unit: LaunchUnit) -> UnitRecord:
        """Start one unit in a session of its own, output appended to `run.log_dir/<name>.log`.

        A unit that is started again is stopped by its old record first: its processes carry its name.

        Raises:
            deploy.errors.StartFailed: names the unit, the program and the cause.
            deploy.errors.FileNotWritten: the log cannot be opened.
        """
        ...

    def poll(self, run: RunContext, records: Sequence[UnitRecord]) -> dict[str, UnitStatus]:
        """The state of each recorded unit, by name. Never raises for a unit that is gone."""
        ...

    def alive(self, records: Sequence[UnitRecord]) -> frozenset[UnitRecord]:
        """Those of them, of any run, whose leading process lives. Cheap: nothing else is looked at."""
        ...

    def stop(self, run: RunContext, records: Sequence[UnitRecord], grace_s: float) -> tuple[int, ...]:
        """End all processes of these units: SIGTERM to each, SIGKILL to what is left after `grace_s`.

        Returns the pids that could not be ended (empty when all are gone).
        """
        ...

    def sweep(self, run: RunContext, records: Sequence[UnitRecord], grace_s: float) -> tuple[int, ...]:
        """End every process that carries this run's id and belongs to no unit of `records`: what a crash left
        between start and record. Returns the pids that could not be ended."""
        ...
