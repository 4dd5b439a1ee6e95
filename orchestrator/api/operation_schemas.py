"""Wire models of operations, and how an answer says which operation it has begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Response

from orchestrator.api.examples import OPERATION
from orchestrator.api.wire import WireModel
from orchestrator.operations import Operation, OperationKind, OperationState

BEGUN: dict[int | str, dict[str, Any]] = {
    202: {
        "headers": {
            "Location": {
                "description": "Of the operation: `GET` says how far it is, `.../events` follows it.",
                "schema": {"type": "string"},
            }
        }
    }
}
"""For the `responses` of a route that answers before what it begins is done."""


class OperationStatus(WireModel, json_schema_extra={"examples": [OPERATION]}):
    id: str
    """Stays as long as the run of the job is recorded, and never names anything else."""
    job: str
    kind: OperationKind
    target: str
    """The version of an update, the process of a restart or drain, the role that is scaled; empty for the whole job."""
    state: OperationState
    """pending: noted, and not begun. refused: it could not be begun. All but pending and running are ends."""
    text: str
    """How far it is, or how it ended."""
    asked_at: float
    begun_at: float | None
    ended_at: float | None
    """None while it has not ended."""
    url: str
    """Of what it is about."""


class OperationList(WireModel, json_schema_extra={"examples": [{"operations": [OPERATION]}]}):
    operations: list[OperationStatus]
    """The newest first."""


def operation_status(operation: Operation) -> OperationStatus:
    return OperationStatus(
        id=str(operation.id),
        job=operation.id.job,
        kind=operation.kind,
        target=operation.target,
        state=operation.state,
        text=operation.text,
        asked_at=operation.asked_at,
        begun_at=operation.begun_at,
        ended_at=operation.ended_at,
        url=operation.url,
    )


def operation_list(found: Sequence[Operation]) -> OperationList:
    return OperationList(operations=[operation_status(each) for each in found])


def point_to(response: Response, operation: str) -> None:
    """Name the operation that an answer has begun."""
    response.headers["Location"] = f"/operations/{operation}"
