"""What callers may wait for and what takes long: ends of jobs, and audits. It holds none of the threads that all routes
share, and a call that is made again waits for what the one before has begun."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from orchestrator.background import in_background
from orchestrator.operations import OperationId
from orchestrator.service import JobService
from orchestrator.store.records import StoredJob
from orchestrator.weights.audit import Audited

Outcome = TypeVar("Outcome")


class LongCalls:
    """Of one service, for the routes of one event loop: `asyncio.wrap_future` waits for them."""

    def __init__(self, service: JobService) -> None:
        self._service = service
        self._going_on: dict[str, Future[Any]] = {}

    def end(self, stop: OperationId) -> Future[StoredJob]:
        """End a job whose stop was begun."""
        return self._begin(str(stop), partial(self._service.end, stop.job))

    def audit(self, job: str, requests: int) -> Future[tuple[Audited, ...]]:
        return self._begin(f"audit {requests} of {job}", partial(self._service.audit, job, requests))

    def _begin(self, name: str, act: Callable[[], Outcome]) -> Future[Outcome]:
        outcome: Future[Outcome] | None = self._going_on.get(name)
        if outcome is None:
            outcome = self._going_on[name] = in_background(act, name)
            outcome.add_done_callback(lambda _: self._going_on.pop(name, None))
        return outcome
