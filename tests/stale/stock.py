"""The control: the engines and the pool of the same job without anything of Headrace's, behind a plain proxy, updated
as people do without it.

Its replies go through the same harness, which has to find wrong ones: else it would find none of Headrace's either.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from deploy.local.backend import LocalBackend
from deploy.probe import check
from deploy.unit import LaunchUnit, RunContext, UnitRecord
from orchestrator.compose import local_service
from orchestrator.plan.types import JobPlan
from orchestrator.spec.load import job_from_data
from orchestrator.store.tokens import write_fresh_token
from tests.e2e.harness import CALL_TIMEOUT_S, EXTERNAL_HITS, UP_TIMEOUT_S, metric, wait_until
from tests.fleet.expected import weight_sets
from tests.fleet.job import PREFILL, fleet_table
from tests.fleet.versions import WEIGHTS, version_name
from tests.stale.client import Clients
from tests.stale.judge import Reply
from tests.stale.schedule import BLOCK, Ask, Fault, Round, Schedule, Update
from tests.stale.stock_proxy import StockProxy

NAME = "stale-control"
OURS = ("--middleware", "--worker-extension-cls", "--weight-transfer-config")
"""Arguments that load something of Headrace's into an engine."""
OURS_IN_CHAIN = "kv_connector_module_path"
PAUSE_MODES = {"readmit": "wait", "wait": "wait", "abort": "abort", "keep": "keep"}
STOP_GRACE_S = 5.0
SCENARIO = Ask(
    talk="replica-by-replica",
    session="replica-by-replica",
    salt="",
    new_part=tuple(place * 29 % 250 + 1 for place in range(15 * BLOCK)),
    completion=4,
    starts_s=0.0,
    stream=False,
    sampling_seed=None,
    leaves_s=None,
)


class StockFleet:
    """Running stock engines, one pair or more."""

    def __init__(self, plan: JobPlan, proxy: StockProxy) -> None:
        assert plan.pool is not None
        assert plan.pool.metrics_url is not None
        self.url = proxy.url
        self._weights = 0
        self._urls = {engine.name: engine.url for engine in plan.engines}
        self.engines = tuple(self._urls)
        self._pool_metrics_url = plan.pool.metrics_url
        self.pair = proxy.pair
        self._versions = proxy.versions
        self._pushes = 0

    def update(self, update: Update) -> str:
        """One engine after the other: pause, load, resume."""
        weights, push = self.next_weights(update.further)
        for name in self.engines:
            self.load(name, weights, push, PAUSE_MODES[update.in_flight])
        return ""

    def next_weights(self, further: int) -> tuple[int, int]:
        """The set that comes so many after the present one, from now on the fleet's, and the number of its push."""
        self._weights = (self._weights + further) % WEIGHTS
        self._pushes += 1
        return self._weights, self._pushes

    def serve_alone(self, name: str, prompt: Sequence[int]) -> None:
        """Let one engine compute a prompt, and wait until the pool has its blocks."""
        wanted = self._pool_keys() + len(prompt) // BLOCK
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        self._post(name, "/v1/completions", body)
        wait_until(f"the pool has {wanted:.0f} blocks", lambda: self._pool_keys() >= wanted)

    def _pool_keys(self) -> float:
        return metric(self._pool_metrics_url, "master_key_count")

    def load(self, name: str, weights: int, push: int, pause_mode: str = "wait") -> None:
        """Bring one engine to a set of weights, caches kept."""
        self._post(name, f"/pause?mode={pause_mode}&clear_cache=false")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weight_sets()[weights])}}
        self._post(name, "/collective_rpc", reload)
        self._versions[name] = version_name(weights, push)
        self._post(name, "/resume")

    def suffer(self, fault: Fault) -> None:
        raise AssertionError("the control needs no faults to go wrong")

    def recover(self) -> None:
        """Nothing to wait for."""

    def pool_hits(self) -> dict[str, float]:
        return {name: metric(f"{self._urls[name]}/metrics", EXTERNAL_HITS) for name in PREFILL if name in self._urls}

    def _post(self, name: str, path: str, body: object = None) -> None:
        reply = httpx.post(f"{self._urls[name]}{path}", json=body, timeout=CALL_TIMEOUT_S, trust_env=False)
        assert reply.is_success, f"{name}{path}: {reply.status_code} {reply.text[:500]}"


def without_faults(schedule: Schedule) -> Schedule:
    """The same for stock engines, which die of clients that leave while they are paused (A27)."""
    return replace(schedule, rounds=tuple(_without_faults(each) for each in schedule.rounds))


def _without_faults(each: Round) -> Round:
    return replace(each, asks=tuple(replace(ask, leaves_s=None) for ask in each.asks), fault=None)


@contextmanager
def stock_fleet(home: Path, pairs: int) -> Iterator[StockFleet]:
    """Running, with its state in `home`."""
    service = local_service(home)
    plan = service.plan(job_from_data(fleet_table(NAME, pairs), source=NAME))
    units = [_stock(unit) for unit in plan.units if unit.name != "router"]
    run = RunContext(job=NAME, run_id=uuid.uuid4().hex, log_dir=home / NAME)
    write_fresh_token(Path(plan.router.token_file))
    backend, records = LocalBackend(), []
    backend.prepare(run, units, plan.files)
    try:
        for stage in sorted({unit.start_stage for unit in units}):
            started = {unit.name: unit for unit in units if unit.start_stage == stage}
            records += [backend.start(run, unit) for unit in started.values()]
            _wait_ready(backend, run, started, records)
        with StockProxy({engine.name: engine.url for engine in plan.engines}) as proxy:
            yield StockFleet(plan, proxy)
    finally:
        backend.stop(run, records, STOP_GRACE_S)
        backend.sweep(run, records, STOP_GRACE_S)


def _stock(unit: LaunchUnit) -> LaunchUnit:
    """A unit of a plan without our arguments."""
    kept: list[str] = []
    words = iter(unit.argv)
    for word in words:
        if word in OURS:
            next(words)
        elif word == "--kv-transfer-config":
            kept += [word, json.dumps(_stock_chain(json.loads(next(words))))]
        else:
            kept.append(word)
    return replace(unit, argv=tuple(kept))


def _stock_chain(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _stock_chain(value) for name, value in part.items() if name != OURS_IN_CHAIN}
    return [_stock_chain(each) for each in part] if isinstance(part, list) else part


def _wait_ready(
    backend: LocalBackend, run: RunContext, units: dict[str, LaunchUnit], records: Sequence[UnitRecord]
) -> None:
    waiting = dict(units)

    def all_ready() -> bool:
        for name, status in backend.poll(run, [each for each in records if each.name in waiting]).items():
            assert status.alive, f"{name} died; its log is in {run.log_dir}"
            if check(waiting[name].probe, status.members).ready:
                del waiting[name]
        return not waiting

    wait_until(lambda: f"ready: {list(waiting)}", all_ready, UP_TIMEOUT_S)


async def replica_by_replica(fleet: StockFleet) -> tuple[Reply, ...]:
    """How weights are often replaced: a prefill engine has the new ones, a decode engine that still has the old ones
    serves a prompt and saves its KV, then it gets the new ones too. Now the same prompt is asked of the pair."""
    weights, push = fleet.next_weights(1)
    prefill, decode = fleet.pair(SCENARIO.session)
    fleet.load(prefill, weights, push)
    fleet.serve_alone(decode, SCENARIO.new_part)
    for name in fleet.engines:
        if name != prefill:
            fleet.load(name, weights, push)
    clients = Clients(fleet.url, schedule=0)
    await clients.ask(SCENARIO, may_be_kept=False)
    return tuple(clients.replies)
