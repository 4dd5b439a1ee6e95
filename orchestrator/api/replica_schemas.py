"""Wire models of restarts, drains and scaled roles. `headrace restart ... --json` prints the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from orchestrator.api.wire import WireModel
from orchestrator.operations import id_of
from orchestrator.store.keeping import ReplicaRequest, RequestKind, RequestOutcome

MAX_REPLICAS = 4096
"""More than any fleet has; what is planned for each takes time and room."""
REQUEST = {
    "number": 1,
    "operation": "demo:1f3c9a2b:request:1",
    "kind": "restart",
    "process": "prefill-1",
    "why": "by request",
    "replicas": None,
    "is_forced": False,
    "asked_at": 1790000000.0,
    "begun_at": 1790000000.4,
    "ended_at": 1790000061.2,
    "outcome": "done",
    "note": "",
}


class LeaveBody(WireModel, json_schema_extra={"examples": [{"force": False}]}):
    model_config = ConfigDict(extra="forbid")

    force: bool = False
    """Also where nobody could serve meanwhile, or an update of the weights is under way."""


class ScaleBody(WireModel, json_schema_extra={"examples": [{"replicas": 2, "force": False}]}):
    model_config = ConfigDict(extra="forbid")

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS, strict=True)]
    """How many the role is to have."""
    force: bool = False
    """Also where nobody could serve meanwhile."""


class RequestStatus(WireModel, json_schema_extra={"examples": [REQUEST]}):
    number: int
    operation: str
    """Its id under /operations."""
    kind: RequestKind
    process: str
    """The process it is about; the role that is scaled."""
    replicas: int | None
    """How many a scaled role is to have."""
    why: str
    is_forced: bool
    asked_at: float
    begun_at: float | None
    ended_at: float | None
    outcome: RequestOutcome | None
    """None while it has not ended."""
    note: str
    """Of how it ended."""


class RequestList(WireModel, json_schema_extra={"examples": [{"requests": [REQUEST]}]}):
    requests: list[RequestStatus]
    """The newest last."""


def request_status(request: ReplicaRequest) -> RequestStatus:
    return RequestStatus(
        number=request.number,
        operation=str(id_of(request.job, request.run_id, "request", request.number)),
        kind=request.kind,
        process=request.unit,
        replicas=request.replicas,
        why=request.why,
        is_forced=request.is_forced,
        asked_at=request.asked_at,
        begun_at=request.begun_at,
        ended_at=request.ended_at,
        outcome=request.outcome,
        note=request.note,
    )


def request_list(requests: Sequence[ReplicaRequest]) -> RequestList:
    return RequestList(requests=[request_status(each) for each in requests])
