"""Watches the processes of a running job: says which have ended and which are ready again, and starts them again.

Whether one is to be started again is decided elsewhere (`orchestrator/supervision.py`: an engine by the coordinator of
weights, the router always). Like `loop.py`, it keeps nothing that has to survive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deploy.backend import Backend
from deploy.errors import DeployError
from deploy.unit import LaunchUnit, UnitRecord, UnitStatus
from orchestrator.errors import HeadraceError
from orchestrator.store.driver_lock import DriverLock
from orchestrator.store.jobs import JobStore, StoredJob, StoredUnit, ended_event
from orchestrator.supervisor.interfaces import ReadinessProbe
from orchestrator.supervisor.restarts import may_start_at

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UnitNews:
    unit: str
    what: Literal["ended", "ready"]
    """ended: also one that was found not ready yet."""


class Watch:
    """Of some units of one run of a job."""

    def __init__(
        self, *, store: JobStore, backend: Backend, probe: ReadinessProbe, job: StoredJob, units: tuple[str, ...]
    ) -> None:
        self._store = store
        self._backend = backend
        self._probe = probe
        self._job = job
        self._units = {unit.name: unit for unit in job.plan.units if unit.name in units}
        self._ready: dict[str, UnitRecord | None] = {stored.record.name: stored.record for stored in job.units}
        """The life of each that was ready when it was last looked at."""
        self._ended: dict[str, UnitRecord] = {}
        """The life of each whose end is on record as an event."""
        self.waiting: set[str] = set()
        """Whose restart was asked for and has not been made."""
        self._coming_up: set[str] = set()
        """Whose life was not ready yet when it was last looked at."""
        self._restarts: dict[str, list[float]] = {}
        self._restarting: threading.Thread | None = None

    def look(self) -> Iterator[UnitNews]:
        """What has changed since the last look; at the first, who is not ready."""
        job = self._store.get(self._job.name)
        statuses = self._backend.poll(job.run, job.records)
        for stored in job.units:
            name = stored.record.name
            if name in self._units:
                yield from self._news(name, stored, statuses[name])
        self._restart_some()

    def restart(self, name: str) -> None:
        """End whatever life the unit has, and start another; returns at once. A life that is not ready yet is another
        one already: it is left alone, also once it is ready."""
        if name not in self._coming_up:
            self.waiting.add(name)

    def _news(self, name: str, stored: StoredUnit, status: UnitStatus) -> Iterator[UnitNews]:
        unit, life = self._units[name], stored.record
        ready = status.alive and (stored.ready_at is not None or self._probe(unit.probe, status.members).ready)
        if ready and stored.ready_at is None:
            self._store.set_ready(self._job.name, self._job.run_id, name, time.time())
        is_coming_up = not ready and _is_coming_up(stored, status, unit)
        (self._coming_up.add if is_coming_up else self._coming_up.discard)(name)
        before, self._ready[name] = self._ready[name], life if ready else None
        if not status.alive and self._ended.get(name) != life:
            self._ended[name] = life
            self._store.events.note(self._job.name, ended_event(life, status.exit_code))
        if before is not None and self._ready[name] != before:
            yield UnitNews(unit=name, what="ended")
        if ready and before != life:
            yield UnitNews(unit=name, what="ready")
        if not ready and before is None and not is_coming_up:
            self.waiting.add(name)

    def _restart_some(self) -> None:
        """One at a time, beside the looks: ending a process takes seconds."""
        if self._restarting is not None and self._restarting.is_alive():
            return
        now = time.monotonic()
        for name in sorted(self.waiting):
            if now >= may_start_at(self._restarts.get(name, ())):
                self.waiting.discard(name)
                self._restarting = threading.Thread(target=self._restart, args=(name,), daemon=True)
                self._restarting.start()
                return

    def _restart(self, name: str) -> None:
        job, unit = self._job, self._units[name]
        lock = DriverLock(job.directory)
        try:
            if not lock.acquire() or not self._may_start():
                self.waiting.add(name)
                return
            # As recorded now: since the last look it may have become ready, and been given up.
            stored = next(each for each in self._store.get(job.name).units if each.record.name == name)
            if _is_coming_up(stored, self._backend.poll(job.run, [stored.record])[name], unit):
                return
            self._restarts.setdefault(name, []).append(time.monotonic())
            left = self._backend.stop(job.run, [stored.record], unit.stop_grace_s)
            if left or not self._may_start():
                self.waiting.add(name)
                return
            record = self._backend.start(job.run, unit)
            self._store.add_unit(job.name, job.run_id, record, time.time())
            self._coming_up.add(name)
            # What was asked for meanwhile is about the life that has ended.
            self.waiting.discard(name)
            _log.info("%s was started again", name)
        except (HeadraceError, DeployError) as error:
            _log.warning("%s could not be started again: %s", name, error)
            self.waiting.add(name)
        finally:
            lock.release()

    def _may_start(self) -> bool:
        return self._store.is_serving(self._job.name, self._job.run_id)


def _is_coming_up(stored: StoredUnit, status: UnitStatus, unit: LaunchUnit) -> bool:
    return status.alive and stored.ready_at is None and time.time() - stored.started_at < unit.ready_timeout_s
