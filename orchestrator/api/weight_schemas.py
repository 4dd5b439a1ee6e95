"""Wire models of weight updates. `headrace weights ... --json` prints the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.api.examples import PUSH, UPDATE, UPDATES, WEIGHTS
from orchestrator.api.wire import OpenTable, WireModel
from orchestrator.operations import id_of
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.store.updates import StoredRemark
from orchestrator.weights.journal import PushOutcome, PushRecord
from orchestrator.weights.words import Going, Phase, Position


class PushBody(WireModel, json_schema_extra={"examples": [PUSH]}):
    model_config = ConfigDict(extra="forbid")

    source: OpenTable
    """Where the version is to be had: what a publisher gives, or {"transport": "path", "path": FOLDER}."""
    version: str | None = None
    """Left out: the source names it."""
    strategy: Strategy | None = None
    in_flight: InFlightMode | None = None
    load_mode: LoadMode | None = None
    """All three: as the job file has them when left out."""


class UpdateStatus(WireModel, json_schema_extra={"examples": [UPDATE]}):
    number: int
    operation: str
    """Its id under /operations."""
    version: str
    source: dict[str, Any]
    strategy: Strategy
    in_flight: InFlightMode
    load_mode: LoadMode
    asked_at: float
    ended_at: float | None
    outcome: PushOutcome | None
    """None while it has not ended."""
    why: str
    is_cancelled: bool
    """Somebody has asked that it ends."""


class Remark(WireModel):
    """From which source an engine joined, why one was given up, what does not succeed."""

    at: float
    text: str


class UpdateList(WireModel, json_schema_extra={"examples": [UPDATES]}):
    updates: list[UpdateStatus]
    remarks: list[Remark]
    """The newest last, in both."""


class ServedWeights(WireModel):
    version: str
    epoch: int
    source: dict[str, Any]
    """From which engines that are restarted load it."""


class CourseStatus(WireModel):
    """What the coordinator is at."""

    update: int
    version: str
    going: Going
    phase: Phase
    epoch: int
    group: list[str]
    why: str


class WeightsStatus(WireModel, json_schema_extra={"examples": [WEIGHTS]}):
    served: ServedWeights | None
    """None where the job has never come up."""
    course: CourseStatus | None
    """None while nothing is under way."""
    to_purge: list[int]
    """Older epochs whose keys are still in the pool."""
    last: UpdateStatus | None


def update_status(record: PushRecord) -> UpdateStatus:
    push = record.push
    return UpdateStatus(
        number=record.number,
        operation=str(id_of(record.job, record.run_id, "update", record.number)),
        version=push.version,
        source=dict(push.source),
        strategy=push.strategy,
        in_flight=push.in_flight,
        load_mode=push.load_mode,
        asked_at=record.asked_at,
        ended_at=record.ended_at,
        outcome=record.outcome,
        why=record.why,
        is_cancelled=record.is_cancelled,
    )


def update_list(records: Sequence[PushRecord], remarks: Sequence[StoredRemark]) -> UpdateList:
    return UpdateList(
        updates=[update_status(each) for each in records],
        remarks=[Remark(at=each.at, text=each.text) for each in remarks],
    )


def weights_status(position: Position | None, newest: PushRecord | None) -> WeightsStatus:
    last = None if newest is None else update_status(newest)
    if position is None:
        return WeightsStatus(served=None, course=None, to_purge=[], last=last)
    committed, course = position.committed, position.course
    return WeightsStatus(
        served=ServedWeights(version=committed.version, epoch=committed.epoch, source=dict(committed.source)),
        course=None
        if course is None
        else CourseStatus(
            update=course.update.number,
            version=course.update.version,
            going=course.going,
            phase=course.phase,
            epoch=course.epoch,
            group=list(course.group),
            why=course.why,
        ),
        to_purge=sorted(epoch for epoch in position.epochs if epoch < committed.epoch),
        last=last,
    )
