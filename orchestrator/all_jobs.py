"""What `headrace serve` does for all jobs unasked: it supervises those that serve, and goes on with starts and stops
that were left half way.

`supervision.py` keeps one job, `service.py` starts and stops one. Where that fails it is tried again, after pauses that
double.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from orchestrator.background import in_background
from orchestrator.errors import HeadraceError, JobExists
from orchestrator.service import JobService
from orchestrator.store.records import SERVING, Phase
from orchestrator.supervisor.interfaces import Progress

LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


@dataclass
class _Care:
    """What is done for a job while it is in one phase, over all tries."""

    phase: Phase
    going_on: Future[None] | None = None
    is_left: bool = False
    """At the look before, nobody was driving its start or stop."""
    again_at: float = 0.0
    pause_s: float = 0.0
    """Before the next try; 0 where the last one did not fail."""
    said: set[str] = field(default_factory=set)
    """Why tries have failed."""

    @property
    def is_busy(self) -> bool:
        return self.going_on is not None and not self.going_on.done()


class AllJobs:
    """Of one state folder."""

    def __init__(self, service: JobService, stopping: threading.Event) -> None:
        self._service = service
        self._stopping = stopping
        self._supervision = service.weights.supervision
        self._cares: dict[str, _Care] = {}

    def keep(self) -> None:
        """Until told to stop. Supervision has left all jobs then; starts and stops go on as long as the process."""
        while not self._stopping.wait(self._supervision.look_every_s):
            try:
                self.look(time.monotonic())
            except HeadraceError as error:
                # A database that is locked or full now may not be so at the next look.
                _log.warning("no job is looked for: %s", error)
        wait([care.going_on for care in self._cares.values() if care.going_on is not None and care.phase in SERVING])

    def look(self, now: float) -> None:
        """Begin what is to be done."""
        phases = self._service.store.unended()
        for name in self._cares.keys() - phases.keys():
            if not self._cares[name].is_busy:
                del self._cares[name]
        for name, phase in phases.items():
            care = self._cares.get(name)
            if care is None or (care.phase != phase and not care.is_busy):
                care = self._cares[name] = _Care(phase)
            if not care.is_busy and now >= care.again_at:
                act = self._next_act(name, care)
                if act is not None:
                    care.going_on = in_background(partial(self._try, name, care, act), f"keep {name}")

    def _next_act(self, name: str, care: _Care) -> Callable[[], object] | None:
        if care.phase in SERVING:
            return partial(self._supervision.keep, name, lambda _position: self._stopping.is_set())
        # Whoever begins a stop, or follows another one, has the job's lock a moment later.
        was_left, care.is_left = care.is_left, not self._service.is_driven(name)
        if not (was_left and care.is_left):
            return None
        if care.phase == "starting":
            return partial(self._go_on_with_start, name)
        return partial(self._service.end if care.pause_s else self._service.finish_stop, name)

    def _go_on_with_start(self, name: str) -> None:
        with suppress(JobExists):
            self._service.drive(self._service.resume(name), _ignore)

    def _try(self, name: str, care: _Care, act: Callable[[], object]) -> None:
        begun = time.monotonic()
        try:
            act()
        except Exception as error:
            if time.monotonic() - begun > LONGEST_PAUSE_S:
                care.pause_s = 0.0
                care.said.clear()
            care.pause_s = min(max(2 * care.pause_s, self._supervision.look_every_s), LONGEST_PAUSE_S)
            care.again_at = time.monotonic() + care.pause_s
            self._say(name, care, error)
        else:
            care.pause_s = 0.0
            care.said.clear()

    def _say(self, name: str, care: _Care, error: Exception) -> None:
        """Each reason once: it may stay for as long as the job is recorded."""
        if (text := f"{type(error).__name__}: {error}") in care.said:
            return
        care.said.add(text)
        if isinstance(error, HeadraceError):
            _log.warning("%s, which is %s: what failed is tried again: %s", name, care.phase, error)
        else:
            _log.error("%s, which is %s: failed in a way that was not foreseen", name, care.phase, exc_info=error)


def _ignore(progress: Progress) -> None:
    """Nobody watches: progress is read from the record by GET."""
    del progress
