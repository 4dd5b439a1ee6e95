"""Operations of all jobs, as the control API asks for them: list, look, cancel. `operations.py` says what they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.errors import CancelRefused, OperationUnknown, RequestUnknown
from orchestrator.operations import (
    REQUEST_STATES,
    UPDATE_STATES,
    Operation,
    OperationId,
    OperationState,
    past_cancelling,
    read_id,
    request_of,
    start_of,
    stop_of,
    update_of,
)
from orchestrator.service import JobService
from orchestrator.store.records import JobHead, RecordUnreadable
from orchestrator.supervisor.view import is_driven
from orchestrator.weight_service import WeightService
from orchestrator.weights.journal import PushRecord, newest_pushes, position_of, push_of
from orchestrator.weights.words import BY_REQUEST, Position

OPEN_MOST = 10_000
"""A job has one update that has not ended, and one request for each of its processes."""


@dataclass(frozen=True, kw_only=True)
class OperationService:
    """Calls block; any thread may make them."""

    service: JobService

    def newest(self, job: str | None, state: OperationState | None, limit: int) -> list[Operation]:
        """Of one job or of all, the newest first.

        Raises:
            JobUnknown: none is recorded under the name.
        """
        found = [each for head in self._heads(job) for each in _of_run(head)]
        pushes = [outcome for outcome, ended in UPDATE_STATES.items() if state in (None, ended)]
        for push in (None, *pushes):
            records = newest_pushes(self._weights.updates, push, job, OPEN_MOST if push is None else limit)
            found += [self._update(each) for each in records]
        outcomes = [outcome for outcome, ended in REQUEST_STATES.items() if state in (None, ended)]
        for outcome in ("", *outcomes):
            requests = self.service.replicas.keeping.newest_of_outcome(outcome, job, limit if outcome else OPEN_MOST)
            found += [request_of(each) for each in requests]
        found = [each for each in found if state in (None, each.state)]
        return sorted(found, key=lambda each: each.asked_at, reverse=True)[:limit]

    def get(self, text: str) -> Operation:
        """Raises `OperationUnknown`."""
        wanted = read_id(text)
        head = None if wanted is None else self.service.store.head(wanted.job)
        if wanted is None or head is None or not head.run_id.startswith(wanted.run):
            raise OperationUnknown(f"no operation has the id {text!r}, or its run is no longer recorded")
        found = self._find(wanted, head)
        if found is None or found.id != wanted:
            raise OperationUnknown(f"the run of job {wanted.job!r} has no operation {text!r}")
        return found

    def cancel(self, text: str) -> Operation:
        """Note that an operation is no longer wanted; it may be asked for again. A start is cancelled by a stop that is
        begun here, for the caller to `JobService.end`.

        Raises:
            OperationUnknown
            CancelRefused: it is past that.
        """
        found, now = self.get(text), time.time()
        job, number = found.id.job, found.id.number
        if why := past_cancelling(found, position_of(self._weights.updates, job)):
            raise CancelRefused(f"operation {text} cannot be cancelled: {why}")
        if found.id.record == "update" and number is not None:
            self._weights.cancel(job, number)
            return self.get(text)
        if number is not None:
            keeping = self.service.replicas.keeping
            is_noted = keeping.withdraw(keeping.request(job, number), BY_REQUEST, now)
        else:
            run_id = self.service.store.get(job).run_id
            is_noted = self.service.store.ask_stop(job, run_id, drain_until=None, now=now, only_unopened=True)
        if not is_noted:
            raise CancelRefused(f"operation {text} cannot be cancelled: it has just gone on")
        return self.get(text)

    @property
    def _weights(self) -> WeightService:
        return self.service.weights

    def _heads(self, job: str | None) -> Sequence[JobHead]:
        if job is None:
            return self.service.store.heads()
        return [self.service.store.head(job) or self.service.store.get(job)]

    def _find(self, wanted: OperationId, head: JobHead) -> Operation | None:
        match wanted.record:
            case "start":
                return start_of(head, driven=is_driven(head))
            case "stop":
                return stop_of(head, driven=is_driven(head))
            case "update" if wanted.number is not None:
                record = push_of(self._weights.updates, head.name, wanted.number)
                return None if record is None else self._update(record)
            case "request" if wanted.number is not None:
                with suppress(RequestUnknown):
                    return request_of(self.service.replicas.keeping.request(head.name, wanted.number))
        return None

    def _update(self, record: PushRecord) -> Operation:
        is_running = record.begun_at is not None and record.outcome is None
        position: Position | None = None
        # What another version recorded of one job keeps no other's from being listed.
        with suppress(RecordUnreadable):
            position = position_of(self._weights.updates, record.job) if is_running else None
        return update_of(record, None if position is None else position.course)


def _of_run(head: JobHead) -> list[Operation]:
    driven = is_driven(head)
    stop = stop_of(head, driven=driven)
    return [start_of(head, driven=driven), *([] if stop is None else [stop])]
