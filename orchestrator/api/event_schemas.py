"""Wire models of events. `headrace events --json` prints the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.api.examples import EVENT, EVENTS
from orchestrator.api.wire import WireModel
from orchestrator.store.events import EventKind, StoredEvent


class EventStatus(WireModel, json_schema_extra={"examples": [EVENT]}):
    seq: int
    """The cursor: grows over all jobs, and none is given twice."""
    at: float
    """Unix time."""
    job: str
    process: str
    """Which it is about; empty for the whole job."""
    kind: EventKind
    text: str
    data: dict[str, Any]
    """What the text says, for programs; which keys there are goes with the kind."""


class EventList(WireModel, json_schema_extra={"examples": [EVENTS]}):
    events: list[EventStatus]
    next: int
    """What to give as `since` for those that come after."""


def event_status(stored: StoredEvent) -> EventStatus:
    event = stored.event
    return EventStatus(
        seq=stored.seq,
        at=stored.at,
        job=stored.job,
        process=event.process,
        kind=event.kind,
        text=event.text,
        data=dict(event.data),
    )


def event_list(found: Sequence[StoredEvent], since: int) -> EventList:
    return EventList(events=[event_status(each) for each in found], next=found[-1].seq if found else since)
