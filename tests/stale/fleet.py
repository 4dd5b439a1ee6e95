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
    UP_TIMEOUT_S,
    Headrace,
    engine_url,
    job_token,
    metric,
    router_state,
    split_job,
    wait_until,
)
from tests.stack.weights.checkpoints import Tensors, changed, checkpoints
from tests.stale.control_plane import ControlPlane, UpdateFailed
from tests.stale.judge import version_name
from tests.stale.schedule import LEASE_S, STALL_S, WEIGHTS, Fault, Update

NAME = "stale-check"
ROUTER_PORT = 9451
ROLES = {"prefill": {"replicas": 2}, "decode": {"replicas": 2, "kv_offload": {"cpu": {"num_bytes": 0}}}}
PREFILL = ("prefill-0", "prefill-1")
ENGINES = (*PREFILL, "decode-0", "decode-1")
STORAGE = "storage-prefill-0"
GRACE_S = 5
"""Until the keys of an old epoch are purged: within the schedule."""
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


def weight_sets() -> list[Path]:
    return checkpoints("qwen3", WEIGHTS)


def job(name: str) -> dict[str, Any]:
    return split_job(
        name,
        weight_sets()[0],
        ROUTER_PORT,
        roles=ROLES,
        handoff={"lease": LEASE_S},
        weights={"limits": {"grace": GRACE_S}},
        monitoring={"enabled": False},
    )


@contextmanager
def job_fleet(headrace: Headrace, scratch: Path) -> Iterator[JobFleet]:
    """The job, running. `scratch`: an empty folder."""
    with ControlPlane(headrace, NAME) as control:
        try:
            yield JobFleet(control, control.start(job(NAME)), scratch)
        finally:
            headrace.down(NAME)


class JobFleet:
    """A running job."""

    def __init__(self, control: ControlPlane, status: dict[str, Any], scratch: Path) -> None:
        self.url: str = status["router"]["url"]
        self._control = control
        self._urls = {name: engine_url(status, name) for name in ENGINES}
        self._token = job_token(status)
        self._weights = 0
        self._pushes = 0
        self._misfit = Path(changed(weight_sets()[0], scratch / "misfit", _without_a_norm)["path"])

    def update(self, update: Update) -> str:
        over = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            stalled = beside.submit(self._stall, update.stalls, over) if update.stalls else None
            try:
                if update.fails_first:
                    self._push_misfit(update)
                weights = (self._weights + update.further) % WEIGHTS
                self._push(weights, weight_sets()[weights], update)
                self._weights = weights
                return ""
            except UpdateFailed as failed:
                return str(failed)
            finally:
                over.set()
                if stalled is not None:
                    stalled.result()

    def _push(self, weights: int, checkpoint: Path, update: Update) -> None:
        self._pushes += 1
        self._control.push(version_name(weights, self._pushes), checkpoint, update.strategy, update.in_flight)

    def _push_misfit(self, update: Update) -> None:
        try:
            self._push(self._weights, self._misfit, update)
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
        return next(int(unit["pid"]) for unit in self._control.status()["units"] if unit["name"] == process)

    def recover(self) -> None:
        def is_whole() -> bool:
            status = self._control.status()
            epochs = [replica["epoch"] for replica in router_state(status)["replicas"] if replica["usable"]]
            return status["phase"] == "ready" and epochs == [self._control.served_epoch()] * len(ENGINES)

        wait_until(lambda: f"all engines serve: {self._control.status()}", is_whole, UP_TIMEOUT_S)

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
