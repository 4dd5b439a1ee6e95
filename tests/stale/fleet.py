"""A fleet that schedules are played on: a real job of two prefill and two decode engines.

`play.py` needs no more of a fleet than `Fleet` says; `stock.py` has one of stock parts.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.e2e.harness import (
    CALL_TIMEOUT_S,
    ENGINE,
    EXTERNAL_HITS,
    engine_url,
    job_token,
    metric,
    split_job,
    wait_until,
)
from tests.stack.weights.checkpoints import Tensors, changed, checkpoints
from tests.stale.judge import version_name
from tests.stale.schedule import LEASE_S, STALL_S, WEIGHTS, Fault, Update
from tests.stale.updates import UpdateFailed, Updater

NAME = "stale-check"
ROUTER_PORT = 9451
ROLES = {"prefill": {"replicas": 2}, "decode": {"replicas": 2, "kv_offload": {"cpu": {"num_bytes": 0}}}}
PREFILL = ("prefill-0", "prefill-1")
ENGINES = (*PREFILL, "decode-0", "decode-1")
STORAGE = "storage-prefill-0"


class Fleet(Protocol):
    """What schedules are played on."""

    url: str
    """For clients."""
    weights: int
    """The set that it has now."""

    def update(self, update: Update) -> None:
        """Returns when the fleet serves the new weights. Blocking."""

    def suffer(self, fault: Fault) -> None:
        """Returns when it is over. Blocking."""

    def pool_hits(self) -> dict[str, float]:
        """Prompt tokens that each prefill engine has read from the pool in its present life."""


def weight_sets() -> list[Path]:
    return checkpoints("qwen3", WEIGHTS)


def job() -> dict[str, Any]:
    """Each engine computes in the process of its scheduler: on two cores, four further processes are in the way."""
    return split_job(
        NAME,
        weight_sets()[0],
        ROUTER_PORT,
        roles=ROLES,
        handoff={"lease": LEASE_S},
        monitoring={"enabled": False},
        engine={**ENGINE, "distributed_executor_backend": "uni"},
        weights={},
    )


class JobFleet:
    """A running job."""

    def __init__(self, status: dict[str, Any], updater: Updater, scratch: Path) -> None:
        self.url: str = status["router"]["url"]
        self.weights = 0
        self._status = status
        self._updater = updater
        self._pushes = 0
        self._misfit = Path(changed(weight_sets()[0], scratch / "misfit", _without_a_norm)["path"])

    def update(self, update: Update) -> None:
        with ThreadPoolExecutor(1) as beside:
            if update.stalls:
                stalled = beside.submit(self._stall, update.stalls)
            if update.fails_first:
                try:
                    self._push(self.weights, self._misfit, update)
                except UpdateFailed:
                    pass
                else:
                    raise AssertionError("a checkpoint without a norm was taken")
            weights = (self.weights + update.further) % WEIGHTS
            self._push(weights, weight_sets()[weights], update)
            self.weights = weights
            if update.stalls:
                stalled.result()

    def _push(self, weights: int, checkpoint: Path, update: Update) -> None:
        self._pushes += 1
        self._updater.push(version_name(weights, self._pushes), checkpoint, update.strategy, update.in_flight)

    def _stall(self, engine: str) -> None:
        """Stop an engine once it is paused, for longer than any handoff lives."""
        url, token = f"{engine_url(self._status, engine)}/is_paused", job_token(self._status)

        def paused() -> bool:
            return bool(httpx.get(url, headers=token, timeout=CALL_TIMEOUT_S, trust_env=False).json()["is_paused"])

        wait_until(f"{engine} is paused", paused, CALL_TIMEOUT_S)
        self._stop(engine, STALL_S)

    def suffer(self, fault: Fault) -> None:
        self._stop(fault.target, fault.lasts_s)

    def _stop(self, process: str, seconds: float) -> None:
        group = next(int(unit["pid"]) for unit in self._status["units"] if unit["name"] == process)
        os.killpg(group, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.killpg(group, signal.SIGCONT)

    def pool_hits(self) -> dict[str, float]:
        token = job_token(self._status)
        return {name: metric(f"{engine_url(self._status, name)}/metrics", EXTERNAL_HITS, token) for name in PREFILL}


def _without_a_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]
