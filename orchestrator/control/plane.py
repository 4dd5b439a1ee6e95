"""What commands ask of a control plane. The answers are the wire models of `api/`.

`local.py` answers from the state folder, `over_http.py` asks a `headrace serve`; `choose.py` says which of them it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from connectors.types import Role
from orchestrator.api.audit_schemas import AuditStatus
from orchestrator.api.event_schemas import EventList, EventStatus
from orchestrator.api.replica_schemas import RequestStatus
from orchestrator.api.schemas import JobStatus
from orchestrator.api.weight_schemas import PushBody, UpdateList, UpdateStatus, WeightsStatus
from orchestrator.api.wire import Note
from orchestrator.errors import JobFailed
from orchestrator.plan.types import JobPlan
from orchestrator.spec.job import JobSpec
from orchestrator.supervisor.interfaces import Progress, ProgressSink, UnitProgress

LOOK_EVERY_S = 0.3


class LogLine(NamedTuple):
    process: str
    line: str


class ControlPlane(Protocol):
    """Calls block. Every error is a `HeadraceError`, whose text and exit code are the same whoever answers."""

    def plan(self, spec: JobSpec) -> JobPlan:
        """As it may be shown, its findings included. Starts nothing."""
        ...

    def start(self, spec: JobSpec, *, warn: Callable[[Sequence[Note]], None], progress: ProgressSink) -> JobStatus:
        """Start a job and wait until it serves; one that lives from the same job file already is waited for.

        An interruption ends what this call has started.
        """
        ...

    def stop(self, name: str, say: Callable[[str], None]) -> JobStatus:
        """Answers when it has ended."""
        ...

    def forget(self, name: str) -> None:
        """Delete the record of a job that has ended."""
        ...

    def names(self) -> list[str]: ...

    def job(self, name: str) -> JobStatus: ...

    def logs(self, name: str, process: str | None, lines: int, *, following: bool) -> Iterator[LogLine]:
        """The last lines of one process, or of all; `following`: and new ones until the job ends."""
        ...

    def events(self, name: str | None, since: int | None, limit: int) -> EventList: ...

    def new_events(self, name: str | None, since: int | None) -> Iterator[EventStatus]:
        """As they happen: those behind the cursor, from now on where none is given."""
        ...

    def audit(self, name: str, requests: int) -> AuditStatus: ...

    def restart(self, name: str, process: str, *, force: bool) -> RequestStatus: ...

    def drain(self, name: str, replica: str, *, force: bool) -> RequestStatus: ...

    def undrain(self, name: str, replica: str) -> RequestStatus: ...

    def scale(self, name: str, role: Role, replicas: int, *, force: bool) -> RequestStatus: ...

    def request_seen_through(self, name: str, number: int) -> RequestStatus:
        """Once it has ended, or its job ends."""
        ...

    def push(self, name: str, body: PushBody) -> UpdateStatus: ...

    def cancel(self, name: str, number: int) -> UpdateStatus: ...

    def update_seen_through(self, name: str, number: int) -> UpdateStatus:
        """Once it has ended, or its job ends."""
        ...

    def weights(self, name: str) -> WeightsStatus: ...

    def updates(self, name: str, limit: int) -> UpdateList:
        """The newest."""
        ...


def see_start_through(look: Callable[[], JobStatus], progress: ProgressSink) -> JobStatus:
    """The job once it serves, where another process brings it up.

    Raises:
        JobFailed: it does not.
    """
    while (job := look()).phase in ("starting", "stopping"):
        progress(_progress(job))
        time.sleep(LOOK_EVERY_S)
    if job.phase == "stopped":
        raise JobFailed(f"job {job.name!r} was stopped by another command while it was coming up")
    if job.phase in ("failed", "abandoned"):
        raise JobFailed(job.reason)
    return job


def _progress(job: JobStatus) -> Progress:
    units = (
        UnitProgress(name=unit.name, state=unit.state, seconds=unit.seconds, detail=unit.detail) for unit in job.units
    )
    return Progress(units=tuple(units), now_doing=job.now_doing)
