"""What takes a while of what somebody asks for, in one form: pure. An operation is what the records of a job say of it,
and nothing else: starts and stops of its run (`store/jobs.py`), updates (`weights/journal.py`), requests about single
processes and roles (`store/keeping.py`).

`operation_service.py` reads the records; `api/operation_schemas.py` is the wire model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from orchestrator.store.keeping import ReplicaRequest, RequestKind, RequestOutcome
from orchestrator.store.records import ENDED, JobHead
from orchestrator.weights.journal import PushOutcome, PushRecord
from orchestrator.weights.words import Course, Position

OperationKind = Literal["start", "stop", "update", RequestKind]
OperationState = Literal["pending", "running", "succeeded", "failed", "cancelled", "refused"]
"""pending: noted, and not begun. refused: it could not be begun."""
RecordKind = Literal["start", "stop", "update", "request"]

UPDATE_STATES: Mapping[PushOutcome, OperationState] = {
    "committed": "succeeded",
    "rolled_back": "failed",
    "called_off": "failed",
    "fenced": "failed",
    "cancelled": "cancelled",
    "refused": "refused",
}
REQUEST_STATES: Mapping[RequestOutcome, OperationState] = {
    "done": "succeeded",
    "failed": "failed",
    "refused": "refused",
    "cancelled": "cancelled",
}
_RECORD: TypeAdapter[RecordKind] = TypeAdapter(RecordKind)
_RUN_CHARS = 8
_ID = re.compile(r"([a-z0-9-]{1,63}):([^:]{1,8}):(?:(start|stop)|(update|request):([1-9][0-9]{0,17}))")


@dataclass(frozen=True, kw_only=True)
class OperationId:
    """Names its run, so that it never means what another run of the job is asked for."""

    job: str
    run: str
    """The first characters of the run's id."""
    record: RecordKind
    number: int | None
    """Of an update or a request."""

    def __str__(self) -> str:
        number = "" if self.number is None else f":{self.number}"
        return f"{self.job}:{self.run}:{self.record}{number}"


@dataclass(frozen=True, kw_only=True)
class Operation:
    id: OperationId
    kind: OperationKind
    target: str
    """The version of an update, the process or role of a request; empty for the whole job."""
    state: OperationState
    text: str
    """How far it is, or how it ended."""
    asked_at: float
    begun_at: float | None
    ended_at: float | None
    url: str
    """Of what it is about."""

    @property
    def has_ended(self) -> bool:
        return self.state not in ("pending", "running")


def id_of(job: str, run_id: str, record: RecordKind, number: int | None = None) -> OperationId:
    return OperationId(job=job, run=run_id[:_RUN_CHARS], record=record, number=number)


def read_id(text: str) -> OperationId | None:
    """None where it is none."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    job, run, alone, numbered, number = found.groups()
    return OperationId(
        job=job,
        run=run,
        record=_RECORD.validate_python(alone or numbered),
        number=None if number is None else int(number),
    )


def newest_of_run(head: JobHead) -> OperationId:
    """Its stop once that was asked for, else its start."""
    return id_of(head.name, head.run_id, "start" if head.stop_asked_at is None else "stop")


def start_of(head: JobHead, *, driven: bool) -> Operation:
    """`driven`: a process is bringing the job up or ending it."""
    state, text, ended_at = _start_state(head, driven=driven)
    return Operation(
        id=id_of(head.name, head.run_id, "start"),
        kind="start",
        target="",
        state=state,
        text=text,
        asked_at=head.created_at,
        begun_at=head.created_at,
        ended_at=ended_at,
        url=f"/jobs/{head.name}",
    )


def _start_state(head: JobHead, *, driven: bool) -> tuple[OperationState, str, float | None]:
    if head.opened_at is not None:
        return "succeeded", "the job has come up", head.opened_at
    if head.phase == "failed":
        return "failed", head.reason, head.phase_at
    if head.phase == "stopped":
        return "cancelled", head.reason or "the job was stopped", head.phase_at
    if not driven:
        return "running", f"whoever was {head.phase} the job is gone; `headrace serve` goes on with it", None
    if head.phase == "stopping":
        return "running", _joined("what was started is being ended", head.reason), None
    ready = sum(unit.ready_at is not None for unit in head.units)
    return "running", f"{len(head.units)} processes were started, {ready} are ready", None


def stop_of(head: JobHead, *, driven: bool) -> Operation | None:
    """None where nobody has asked for it."""
    if head.stop_asked_at is None:
        return None
    has_ended = head.phase in ENDED
    text = "processes are being ended" if head.drain_until is None else "open requests finish, then processes are ended"
    if not driven:
        text = "whoever was stopping the job is gone; stop it again, or `headrace serve` goes on with it"
        text = head.reason or text
    return Operation(
        id=id_of(head.name, head.run_id, "stop"),
        kind="stop",
        target="",
        state="succeeded" if has_ended else "running",
        text="all its processes have ended" if has_ended else text,
        asked_at=head.stop_asked_at,
        begun_at=head.stop_asked_at,
        ended_at=head.phase_at if has_ended else None,
        url=f"/jobs/{head.name}",
    )


def update_of(record: PushRecord, course: Course | None) -> Operation:
    """`course`: what the job's coordinator is at."""
    if record.outcome is not None:
        text = record.why or f"version {record.push.version} is served"
    elif record.begun_at is None:
        text = "whoever supervises the job begins it"
    elif course is not None and course.update.number == record.number:
        text = _joined(f"{course.going}, {course.phase}", course.why)
    else:
        text = "begun"
    if record.outcome is None and record.is_cancelled:
        text = _joined(text, "somebody asked that it ends")
    return Operation(
        id=id_of(record.job, record.run_id, "update", record.number),
        kind="update",
        target=record.push.version,
        state=_open_state(record.begun_at) if record.outcome is None else UPDATE_STATES[record.outcome],
        text=text,
        asked_at=record.asked_at,
        begun_at=record.begun_at,
        ended_at=record.ended_at,
        url=f"/jobs/{record.job}/weights/updates/{record.number}",
    )


def request_of(request: ReplicaRequest) -> Operation:
    text = "its turn has not come" if request.begun_at is None else _joined("it is being carried out", request.why)
    return Operation(
        id=id_of(request.job, request.run_id, "request", request.number),
        kind=request.kind,
        target=request.unit,
        state=_open_state(request.begun_at) if request.outcome is None else REQUEST_STATES[request.outcome],
        text=text if request.outcome is None else request.note or request.outcome,
        asked_at=request.asked_at,
        begun_at=request.begun_at,
        ended_at=request.ended_at,
        url=f"/jobs/{request.job}/requests/{request.number}",
    )


def _open_state(begun_at: float | None) -> OperationState:
    return "pending" if begun_at is None else "running"


def past_cancelling(found: Operation, position: Position | None) -> str:
    """Why it cannot be cancelled; empty where it can be, or is being cancelled already."""
    if found.has_ended:
        return f"it has ended: {found.state}"
    match found.id.record:
        case "stop":
            return "what is ended does not come back; start the job again once it has stopped"
        case "request" if found.begun_at is not None:
            return "it was begun, and goes on to its end"
        case "update" if position is not None and position.course is not None:
            course = position.course
            is_committed = course.update.number == found.id.number and course.epoch == position.committed.epoch
            if is_committed and course.going == "forward":
                return f"version {found.target} is committed already"
    return ""


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
