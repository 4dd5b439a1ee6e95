"""A fleet that schedules are played on: a real job of two prefill and two decode engines.

`play.py` needs no more of a fleet than `Fleet` says; `stock.py` has one of stock parts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.e2e.harness import (
    CALL_TIMEOUT_S,
    EXTERNAL_HITS,
    Headrace,
    engine_url,
    job_token,
    metric,
    unit_pid,
)
from tests.fleet.control import Control, UpdateFailed, control_plane
from tests.fleet.expected import weight_sets
from tests.fleet.job import ENGINES, LEASE_S, NAME, PREFILL, fleet_table, wait_whole
from tests.fleet.versions import WEIGHTS, weights_of
from tests.stack.weights.checkpoints import Tensors, changed
from tests.stale.schedule import Fault, Update

STALL_S = LEASE_S + 3.0
LOOK_EVERY_S = 0.05
FRESH_S = 0.5
"""An answer that took longer says nothing of now."""


class Fleet(Protocol):
    """What schedules are played on."""

    url: str
    """For clients."""

    def update(self, update: Update) -> str:
        """Returns when it has ended: empty if the fleet has the new weights, else why not. Blocking."""

    def suffer(self, fault: Fault) -> None:
        """Returns when it is over. Blocking."""

    def recover(self) -> None:
        """Returns when all engines serve again. Blocking."""

    def pool_hits(self) -> dict[str, float]:
        """Prompt tokens that each prefill engine that answers has read from the pool in its present life."""


@contextmanager
def job_fleet(headrace: Headrace, scratch: Path) -> Iterator[JobFleet]:
    """The job, running. `scratch`: an empty folder."""
    with control_plane(headrace, NAME) as control, control.running_job(fleet_table()) as status:
        yield JobFleet(control, status, scratch)


class JobFleet:
    """A running job."""

    def __init__(self, control: Control, status: dict[str, Any], scratch: Path) -> None:
        self.url: str = status["router"]["url"]
        self._control = control
        self._status = status
        self._urls = {name: engine_url(status, name) for name in ENGINES}
        self._token = job_token(status)
        self._misfit = Path(changed(weight_sets()[0], scratch / "misfit", _without_a_norm)["path"])

    def update(self, update: Update) -> str:
        over = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            stalled = beside.submit(self._stall, update.stalls, over) if update.stalls else None
            try:
                if update.fails_first:
                    self._push_misfit(update)
                weights = weights_of(self._control.served()[0]) + update.further
                self._control.update(weights % WEIGHTS, strategy=update.strategy, in_flight=update.in_flight)
                return ""
            except UpdateFailed as failed:
                return str(failed)
            finally:
                over.set()
                if stalled is not None:
                    stalled.result()

    def _push_misfit(self, update: Update) -> None:
        try:
            self._control.update(checkpoint=self._misfit, strategy=update.strategy, in_flight=update.in_flight)
        except UpdateFailed:
            return
        raise AssertionError("a checkpoint without a norm was taken")

    def _stall(self, engine: str, over: threading.Event) -> None:
        """Stop an engine once it is paused, for longer than any handoff lives. Not one that may be at work again: what
        it would then read late is another matter."""
        pid = self._pid(engine)
        while not over.wait(LOOK_EVERY_S):
            asked_at = time.monotonic()
            if self._is_paused(engine) and time.monotonic() - asked_at < FRESH_S:
                _stop(pid, STALL_S)
                return

    def _is_paused(self, engine: str) -> bool:
        url = f"{self._urls[engine]}/is_paused"
        try:
            reply = httpx.get(url, headers=self._token, timeout=CALL_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError:
            return False
        return reply.is_success and bool(reply.json()["is_paused"])

    def suffer(self, fault: Fault) -> None:
        pid = self._pid(fault.target)
        if fault.kind == "kill":
            _signal(pid, signal.SIGKILL)
        else:
            _stop(pid, fault.lasts_s)

    def _pid(self, process: str) -> int:
        return unit_pid(self._control.status(), process)

    def recover(self) -> None:
        wait_whole(self._status, self._control)

    def pool_hits(self) -> dict[str, float]:
        found = {}
        for name in PREFILL:
            with suppress(httpx.HTTPError):
                found[name] = metric(f"{self._urls[name]}/metrics", EXTERNAL_HITS, self._token)
        return found


def _stop(pid: int, seconds: float) -> None:
    _signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    """To all processes of an engine or a storage client; one that is gone at the moment has nothing to hear."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _without_a_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]
