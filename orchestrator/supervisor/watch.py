"""Watches the processes of a running job: says which have ended and which are ready again, and starts them again. What
the plan has and nobody has started yet is started as well, and what it has no more is ended.

`upkeep.py` decides which are started now, on what is seen here. All that has to survive are the ends of lives
(`store/keeping.py`): the rest is seen again by whoever watches next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

from deploy.backend import Backend
from deploy.errors import DeployError
from deploy.logs import tail
from deploy.probe import ProbeResult
from deploy.unit import LaunchUnit, UnitRecord, UnitStatus
from orchestrator.background import in_background
from orchestrator.errors import HeadraceError
from orchestrator.plan.kinds import kinds_of
from orchestrator.store.events import Event
from orchestrator.store.jobs import JobStore, ended_event
from orchestrator.store.keeping import KeepingStore, UnitEnd, life_of
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import StoredJob, StoredUnit
from orchestrator.supervisor.interfaces import ReadinessProbe
from orchestrator.supervisor.log_cause import end_cause
from orchestrator.supervisor.probing import probe_units
from orchestrator.supervisor.restarts import Row, row_of
from orchestrator.supervisor.start import LOG_LINES_READ
from orchestrator.supervisor.stop import SWEEP_GRACE_S
from orchestrator.supervisor.upkeep import LifeState, UnitSight, upkeep

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UnitNews:
    unit: str
    what: Literal["awaited", "ended", "ready"]
    """awaited: at the first look, its life has not been ready yet, or it has had none."""


class Watch:
    """Of one run of a job."""

    def __init__(
        self, *, store: JobStore, keeping: KeepingStore, backend: Backend, probe: ReadinessProbe, job: StoredJob
    ) -> None:
        self._store = store
        self._keeping = keeping
        self._backend = backend
        self._probe = probe
        self._job = job
        self._kinds = kinds_of(job.plan)
        self._units = {unit.name: unit for unit in job.plan.units}
        self._ready: dict[str, UnitRecord | None] = {
            stored.record.name: stored.record for stored in job.units if stored.ready_at is not None
        }
        """The life of each that was ready when it was last looked at."""
        self._ends = keeping.ends(job.name)
        self._noted: set[str] = set()
        """Lives whose ends were noted."""
        self._dead: dict[str, UnitRecord] = {}
        """The life of each whose death is on record as an event."""
        self._replaced: dict[str, str] = {}
        """Whose life is to make way for another one, though it lives."""
        self._acting: Future[None] | None = None
        self.units: Mapping[str, StoredUnit] = {}
        """Those of the plan that were started, as they were at the last look."""
        self.surplus: Sequence[UnitRecord] = ()
        """Of processes that the plan has no more."""
        self.unended = ""
        """Which of these would not end, in words."""
        self.states: Mapping[str, LifeState] = {}
        self.given_up: Mapping[str, Row] = {}
        """Which are not started any more."""

    def look(self) -> Iterator[UnitNews]:
        """What has changed since the last look; at the first, who is not ready."""
        job = self._store.get(self._job.name)
        self.units = {stored.record.name: stored for stored in job.units if stored.record.name in self._units}
        self.surplus = [record for record in job.records if record.name not in self._units]
        statuses = self._backend.poll(job.run, job.records)
        coming_up = [self._units[name] for name, stored in self.units.items() if _comes_up(stored, statuses[name])]
        probed = probe_units(coming_up, statuses, self._probe)
        states = {name: self._state(stored, statuses[name], probed) for name, stored in self.units.items()}
        self.states = {name: states.get(name, "ended") for name in self._kinds}
        for name in self._units.keys() - self._ready.keys():
            self._ready[name] = None
            yield UnitNews(unit=name, what="awaited")
        for name, stored in self.units.items():
            self._note_death(stored.record, statuses[name])
            if self.states[name] == "ended":
                self._note(stored, _cause(stored, statuses[name], self._units[name]))
            yield from self._news(stored.record, is_ready=self.states[name] == "ready")
        self._go_on()

    def restart(self, name: str, why: str) -> None:
        """Somebody cannot use the life that the unit has: it is one that has ended. Returns at once. A life that is not
        ready yet is another one already: it is left alone, also once it is ready."""
        if self.states.get(name) == "ready" and self._replaced.get(name) != life_of(self.units[name].record):
            self._note(self.units[name], why)
            self._replaced[name] = life_of(self.units[name].record)

    def replace(self, name: str, life: str) -> None:
        """End this life of a unit, ready or not, and start another one at once, also of one that was given up."""
        if self._replaced.get(name) != life:
            self._keeping.forget_ends(self._job.name, name)
            self._ends.pop(name, None)
            self._replaced[name] = life

    def row(self, name: str) -> Row:
        """The newest ends of a unit."""
        return row_of(self._kinds[name], self._ends.get(name, ()))

    def _state(self, stored: StoredUnit, status: UnitStatus, probed: Mapping[str, ProbeResult]) -> LifeState:
        unit = self._units[stored.record.name]
        if not status.alive:
            return "ended"
        if stored.ready_at is not None:
            return "ready"
        if probed[unit.name].ready:
            self._store.set_ready(self._job.name, self._job.run_id, unit.name, time.time())
            return "ready"
        return "coming_up" if time.time() - stored.started_at < unit.ready_timeout_s else "ended"

    def _news(self, record: UnitRecord, *, is_ready: bool) -> Iterator[UnitNews]:
        before, self._ready[record.name] = self._ready[record.name], record if is_ready else None
        if before is not None and self._ready[record.name] != before:
            yield UnitNews(unit=record.name, what="ended")
        if is_ready and before != record:
            yield UnitNews(unit=record.name, what="ready")

    def _note_death(self, record: UnitRecord, status: UnitStatus) -> None:
        """As an event; also of a life that made way for another one."""
        if not status.alive and self._dead.get(record.name) != record:
            self._dead[record.name] = record
            self._store.events.note(self._job.name, ended_event(record, status.exit_code))

    def _note(self, stored: StoredUnit, cause: str) -> None:
        life, now = life_of(stored.record), time.time()
        if life in self._noted or self._replaced.get(stored.record.name) == life:
            return
        self._noted.add(life)
        ready_s = 0.0 if stored.ready_at is None else max(0.0, now - stored.ready_at)
        self._end(stored.record.name, life, UnitEnd(at=now, ready_s=ready_s, cause=cause))

    def _end(self, name: str, life: str, end: UnitEnd) -> None:
        _log.warning("%s: %s", name, end.cause)
        self._keeping.note_end(self._job.name, self._job.run_id, name, life, end)
        self._ends = self._keeping.ends(self._job.name)

    def _go_on(self) -> None:
        """Start and end processes one at a time, beside the looks: ending one takes seconds."""
        up = upkeep(
            [
                UnitSight(
                    name=name,
                    kind=kind,
                    state=self.states[name],
                    is_replaced=name in self.units and self._replaced.get(name) == life_of(self.units[name].record),
                    row=self.row(name),
                )
                for name, kind in self._kinds.items()
            ],
            time.time(),
        )
        for name in up.given_up.keys() - self.given_up.keys():
            text = f"{name} is given up: {up.given_up[name]}"
            self._store.events.note(self._job.name, Event(kind="process_given_up", process=name, text=text))
        self.given_up = up.given_up
        if self._acting is not None and not self._acting.done():
            return
        if up.start:
            name = up.start[0]
            before = self.units[name].record if name in self.units else None
            self._acting = in_background(partial(self._start, name, before), f"{self._job.name}: start {name}")
        elif self.surplus:
            self._acting = in_background(partial(self._remove, self.surplus), f"{self._job.name}: remove processes")

    def _start(self, name: str, before: UnitRecord | None) -> None:
        """End what is left of a unit's life before, if it had one, and start another."""
        job, unit = self._job, self._units[name]
        lock = DriverLock(job.directory)
        try:
            if not lock.acquire() or not self._may_act() or self._newest(name) != before:
                return
            if left := self._end_life(before, unit):
                self._fail(name, f"these processes of it could not be ended: {_listed(left)}")
                return
            if before is None:
                self._backend.prepare(job.run, [unit], job.plan.files)
            if self._may_act():
                record = self._backend.start(job.run, unit)
                self._store.add_unit(job.name, job.run_id, record, time.time())
                _log.info("%s was started%s", name, " again" if before else "")
        except (HeadraceError, DeployError) as error:
            self._fail(name, f"it could not be started: {error}")
        except Exception as error:
            self._fail(name, f"it could not be started: unexpected {type(error).__name__}: {error}")
            raise
        finally:
            lock.release()

    def _end_life(self, before: UnitRecord | None, unit: LaunchUnit) -> tuple[int, ...]:
        """Pids that are left. Where no life is recorded, there may be one all the same, whose starter was killed before
        it could record it."""
        if before is not None:
            return self._backend.stop(self._job.run, [before], unit.stop_grace_s)
        return self._backend.sweep(self._job.run, self._store.get(self._job.name).records, SWEEP_GRACE_S)

    def _remove(self, records: Sequence[UnitRecord]) -> None:
        """End processes that the plan has no more. What could not be ended now is tried again."""
        job, grace_s = self._job, self._job.plan.spec.launch.stop_grace
        lock = DriverLock(job.directory)
        try:
            if not lock.acquire() or not self._may_act():
                return
            left = self._backend.stop(job.run, records, grace_s)
            self.unended = f"these processes could not be ended: {_listed(left)}" if left else ""
            for record in records if not left else ():
                self._store.remove_unit(job.name, job.run_id, record.name, time.time())
        except HeadraceError as error:
            _log.warning("not removed yet: %s", error)
        finally:
            lock.release()

    def _newest(self, name: str) -> UnitRecord | None:
        return next((each for each in self._store.get(self._job.name).records if each.name == name), None)

    def _fail(self, name: str, why: str) -> None:
        """A life that did not come to be."""
        now = time.time()
        self._end(name, f"none, at {now}", UnitEnd(at=now, ready_s=0.0, cause=why))

    def _may_act(self) -> bool:
        return self._store.is_serving(self._job.name, self._job.run_id)


def _comes_up(stored: StoredUnit, status: UnitStatus) -> bool:
    return status.alive and stored.ready_at is None


def _listed(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))


def _cause(stored: StoredUnit, status: UnitStatus, unit: LaunchUnit) -> str:
    if status.alive:
        return f"was not ready within {unit.ready_timeout_s:.0f} s"
    return end_cause(status.exit_code, tail(stored.record.log, LOG_LINES_READ))
