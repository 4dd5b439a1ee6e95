"""Waits for the outcome of what somebody asked of a job: of an update, or of a request about its processes.

`weight_service.py` and `replica_service.py` say what is looked at; `supervision.py` brings it about.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from orchestrator.store.records import SERVING
from orchestrator.supervision import Supervision
from orchestrator.weights.words import Position

LOOK_EVERY_S = 0.3


class Asked(Protocol):
    @property
    def outcome(self) -> str | None:
        """None while it has not ended."""
        ...


AnyAsked = TypeVar("AnyAsked", bound=Asked)


def ended_within(timeout_s: float, look: Callable[[], AnyAsked]) -> AnyAsked:
    """What is looked at once it has ended, or as it is after so long."""
    deadline = time.monotonic() + timeout_s
    while (found := look()).outcome is None and time.monotonic() <= deadline:
        time.sleep(LOOK_EVERY_S)
    return found


def seen_through(supervision: Supervision, job: str, look: Callable[[], AnyAsked]) -> AnyAsked:
    """What is looked at once it has ended, or the job does not serve any longer. Where nobody supervises the job, this
    call does so meanwhile."""

    def is_over(position: Position) -> bool:
        return position.course is None and look().outcome is not None

    while (found := look()).outcome is None:
        if not supervision.keep(job, is_over):
            found = ended_within(LOOK_EVERY_S, look)
        elif supervision.store.get(job).phase not in SERVING:
            return look()
    return found
