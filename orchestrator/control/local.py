"""Answers from the state folder of this machine, with or without a `headrace serve` on it: locks keep the two apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from connectors.types import Role
from deploy.logs import follow, pause, tail
from orchestrator.api.audit_schemas import AuditStatus, audit_status
from orchestrator.api.event_schemas import EventList, EventStatus, event_list, event_status
from orchestrator.api.replica_schemas import RequestStatus, request_status
from orchestrator.api.schemas import JobStatus, job_status, notes
from orchestrator.api.weight_schemas import (
    PushBody,
    UpdateList,
    UpdateStatus,
    WeightsStatus,
    update_list,
    update_status,
    weights_status,
)
from orchestrator.api.wire import Note
from orchestrator.control.plane import LogLine, see_start_through
from orchestrator.plan.shown import shown_plan
from orchestrator.plan.types import JobPlan
from orchestrator.service import JobService
from orchestrator.spec.job import JobSpec
from orchestrator.store.events import EventStore
from orchestrator.store.records import ENDED, StoredJob
from orchestrator.supervisor.interfaces import ProgressSink
from orchestrator.weight_service import PushOptions

LOOK_EVERY_S = 0.5
PAGE = 1000


@dataclass(frozen=True)
class LocalControlPlane:
    service: JobService

    def plan(self, spec: JobSpec) -> JobPlan:
        return shown_plan(self.service.plan(spec))

    def start(self, spec: JobSpec, *, warn: Callable[[Sequence[Note]], None], progress: ProgressSink) -> JobStatus:
        admission = self.service.admit_once(spec)
        if admission is None:
            return see_start_through(partial(self.job, spec.name), progress)
        warn(notes(admission.job.plan.findings, "warning"))
        self.service.drive(admission, progress)
        return self.job(spec.name)

    def stop(self, name: str, say: Callable[[str], None]) -> JobStatus:
        self.service.stop(name, say)
        return self.job(name)

    def forget(self, name: str) -> None:
        self.service.forget(name)

    def names(self) -> list[str]:
        return self.service.store.names()

    def job(self, name: str) -> JobStatus:
        return job_status(self.service.view(name))

    def logs(self, name: str, process: str | None, lines: int, *, following: bool) -> Iterator[LogLine]:
        job = self.service.store.get(name)
        paths = [job.log_of(unit) for unit in ([process] if process else job.unit_names)]
        if following:
            yield from (LogLine(*found) for found in follow(paths, lines, lambda: pause() and self._goes_on(job)))
            return
        for path in paths:
            yield from (LogLine(path.stem, line) for line in tail(path, lines))

    def _goes_on(self, job: StoredJob) -> bool:
        now = self.service.store.find(job.name)
        return now is not None and now.run_id == job.run_id and now.phase not in ENDED

    def events(self, name: str | None, since: int | None, limit: int) -> EventList:
        store = self._store_of(name)
        found = store.newest(limit, name) if since is None else store.since(since, limit, name)
        return event_list(found, since or 0)

    def new_events(self, name: str | None, since: int | None) -> Iterator[EventStatus]:
        store = self._store_of(name)
        seq = store.newest_seq() if since is None else since
        while True:
            found = store.since(seq, PAGE, name)
            for each in found:
                seq = each.seq
                yield event_status(each)
            if len(found) < PAGE:
                time.sleep(LOOK_EVERY_S)

    def _store_of(self, name: str | None) -> EventStore:
        """Raises `JobUnknown`."""
        if name is not None:
            self.service.store.get(name)
        return self.service.store.events

    def audit(self, name: str, requests: int) -> AuditStatus:
        return audit_status(self.service.audit(name, requests))

    def restart(self, name: str, process: str, *, force: bool) -> RequestStatus:
        return request_status(self.service.replicas.restart(name, process, force=force))

    def drain(self, name: str, replica: str, *, force: bool) -> RequestStatus:
        return request_status(self.service.replicas.drain(name, replica, force=force))

    def undrain(self, name: str, replica: str) -> RequestStatus:
        return request_status(self.service.replicas.undrain(name, replica))

    def scale(self, name: str, role: Role, replicas: int, *, force: bool) -> RequestStatus:
        return request_status(self.service.replicas.scale(name, role, replicas, force=force))

    def request_seen_through(self, name: str, number: int) -> RequestStatus:
        return request_status(self.service.replicas.see_through(name, number))

    def push(self, name: str, body: PushBody) -> UpdateStatus:
        options = PushOptions(strategy=body.strategy, in_flight=body.in_flight, load_mode=body.load_mode)
        return update_status(self.service.weights.push(name, body.version, body.source, options))

    def cancel(self, name: str, number: int) -> UpdateStatus:
        return update_status(self.service.weights.cancel(name, number))

    def update_seen_through(self, name: str, number: int) -> UpdateStatus:
        return update_status(self.service.weights.see_through(name, number))

    def weights(self, name: str) -> WeightsStatus:
        weights = self.service.weights
        return weights_status(weights.position(name), weights.newest(name))

    def updates(self, name: str, limit: int) -> UpdateList:
        weights = self.service.weights
        return update_list(weights.history(name, limit), weights.remarks(name))
