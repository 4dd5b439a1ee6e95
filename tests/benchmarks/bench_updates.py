"""`make bench-updates`: what new weights cost those who use a job, on a real fleet of two pairs under steady load.

Barrier: how long the gate is closed, beside pause, load and resume of the same engines without anything around them.
Rolling: failed requests, and whether both epochs find their KV in the pool meanwhile. Figures are printed with what
they should be and nothing fails because of them; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from connectors.engine_client import CommandOrder, EngineClient
from orchestrator.weights.phases import SEQUENCES
from orchestrator.weights.words import Phase
from tests.benchmarks.figures import Figure, Goal, result_line
from tests.benchmarks.steady_load import pool_hits, steady_load
from tests.e2e.harness import CALL_TIMEOUT_S, Headrace, internal_url, job_token
from tests.fleet.control import Control, control_plane
from tests.fleet.expected import weight_sets
from tests.fleet.job import ENGINES, NAME, engine_of, fleet_table, wait_whole
from tests.fleet.journal import next_phases
from tests.stack.weights.checkpoints import path_source

LOOK_EVERY_S = 0.005
UPDATES = 7
ROLLS = 3
Recorded = Sequence[tuple[Phase, float]]
_STEPS = SEQUENCES["barrier", "forward"]
CLOSED = _STEPS[_STEPS.index("hold") : _STEPS.index("purge")]
"""The phases of a barrier in which requests wait; one that asks nobody for anything may be too short to be seen."""

GOALS = (
    Goal(
        key="gate_closed_ratio",
        title="barrier: gate closed, beside pause, load and resume of the same engines alone",
        unit="ms",
        bound="at most",
        limit=1.15,
        is_ratio=True,
        peer="alone",
    ),
    Goal(
        key="rolling_failed",
        title="rolling: requests that were not answered",
        unit="requests",
        bound="at most",
        limit=0,
        is_ratio=False,
    ),
    Goal(
        key="rolling_hits_old",
        title="rolling: prompt tokens from the pool in the old epoch, in each roll",
        unit="tokens",
        bound="at least",
        limit=1,
        is_ratio=False,
    ),
    Goal(
        key="rolling_hits_new",
        title="rolling: prompt tokens from the pool in the new epoch, in each roll",
        unit="tokens",
        bound="at least",
        limit=1,
        is_ratio=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    control: Control
    job: dict[str, Any]
    model: Path

    def barrier(self, updates: int) -> list[Figure]:
        closed_ms, alone_ms, failed, phases_ms = [], [], 0, []
        for _ in range(updates):
            wait_whole(self.job, self.control)
            alone_ms.append(self._alone_ms())
            wait_whole(self.job, self.control)
            with steady_load(self.job) as statuses, ThreadPoolExecutor(2) as beside:
                phases = beside.submit(next_phases, self.control.headrace.home)
                closed = beside.submit(next_closed_ms, self.job)
                self.control.push(checkpoint=self.model, strategy="barrier")
                closed_ms.append(closed.result())
                phases_ms.append(_lengths_ms(phases.result()))
            failed += _failed(statuses)
        medians = {phase: median(each.get(phase, 0.0) for each in phases_ms) for phase in CLOSED}
        parts = " ".join(f"{phase} {length_ms:.0f}" for phase, length_ms in medians.items())
        notes = [f"ms of each phase, medians: {parts}", f"requests that were not answered: {failed}"]
        return [Figure(goal=GOALS[0], ours=closed_ms, peer=alone_ms, notes=notes)]

    def rolling(self, rolls: int) -> list[Figure]:
        failed, old, new = [], [], []
        for _ in range(rolls):
            wait_whole(self.job, self.control)
            _, epoch = self.control.served()
            with steady_load(self.job) as statuses, pool_hits(self.job) as hits:
                self.control.update(checkpoint=self.model, strategy="rolling")
            failed.append(_failed(statuses))
            old.append(hits[epoch])
            new.append(hits[self.control.served()[1]])
        values = ([sum(failed)], old, new)
        return [Figure(goal=goal, ours=each, peer=()) for goal, each in zip(GOALS[1:], values, strict=True)]

    def _alone_ms(self) -> float:
        """Pause, load and resume, each on all engines side by side; of the weights that they have, so that the job is
        as before."""
        version, epoch = self.control.served()
        source = path_source(self.model, version)
        with ExitStack() as stack:
            engines = [Commanded(stack.enter_context(engine_of(self.job, name))) for name in ENGINES]
            threads = stack.enter_context(ThreadPoolExecutor(len(engines)))
            began = time.monotonic()
            for step in (Commanded.pause, lambda each: each.load(source), Commanded.resume):
                list(threads.map(step, engines))
            took_ms = 1000 * (time.monotonic() - began)
            list(threads.map(lambda each: each.confirm(epoch), engines))
        return took_ms


class Commanded:
    """An engine and the order of the newest command to it."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        fence = client.fence()
        self._life, self._order = fence.instance, fence.next_order()

    def pause(self) -> None:
        self._client.pause(self._life, self._next(), CALL_TIMEOUT_S)

    def load(self, source: Mapping[str, Any]) -> None:
        answer = self._client.load_weights(self._life, source, self._next())
        assert answer.ok, answer.error

    def resume(self) -> None:
        self._client.resume(self._life, self._next())

    def confirm(self, epoch: int) -> None:
        self._client.confirm_epoch(self._life, epoch, self._next())

    def _next(self) -> CommandOrder:
        self._order = self._order.next_step()
        return self._order


def next_closed_ms(job: dict[str, Any]) -> float:
    """How long the gate is closed when it closes next, as the router itself says. Blocking."""
    changes: list[float] = []
    headers = job_token(job)
    with httpx.Client(base_url=internal_url(job), headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False) as http:
        for is_open in (True, False):
            while (http.get("/state").json()["gate"] == "open") == is_open:
                time.sleep(LOOK_EVERY_S)
            changes.append(time.monotonic())
    return 1000 * (changes[1] - changes[0])


def _lengths_ms(recorded: Recorded) -> dict[Phase, float]:
    return {phase: 1000 * (after - at) for (phase, at), (_, after) in pairwise(recorded)}


def _failed(statuses: Counter[int]) -> int:
    return statuses.total() - statuses[200]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make bench-updates", description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help="barriers")
    parser.add_argument("--rolls", type=int, default=ROLLS, help="rolling updates")
    parser.add_argument("--model", type=Path, default=weight_sets()[0], help="folder with a checkpoint")
    chosen = parser.parse_args(argv)
    # Whatever ends it, the fleet goes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = chosen.model.absolute()
    with tempfile.TemporaryDirectory(prefix="bench-updates-") as folder:
        headrace = Headrace(Path(folder))
        with control_plane(headrace, NAME) as control, control.running_job(fleet_table(model=model)) as job:
            bench = Bench(control=control, job=job, model=model)
            figures = _said(bench.barrier(chosen.updates)) if chosen.updates else []
            figures += _said(bench.rolling(chosen.rolls)) if chosen.rolls else []
    print(result_line(figures, GOALS))


def _said(figures: list[Figure]) -> list[Figure]:
    for figure in figures:
        print("\n" + figure.report(), flush=True)
    return figures


if __name__ == "__main__":
    main()
