"""`kill -9` of the pool's own processes and of Prometheus: real ones, kept as those of a job are.

No engine is needed to see that the master counts the planned capacity again (field case A31)."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from connectors.mooncake import TCP_ENVIRONMENT
from connectors.pool_client import PoolClient
from connectors.store_argv import CAPACITY_METRIC
from deploy import probe as readiness
from deploy.local.backend import LocalBackend
from deploy.probe import check
from deploy.unit import MetricProbe
from orchestrator.observe.outside import Outside, look_outside
from orchestrator.plan.build import build_plan
from orchestrator.plan.kinds import MASTER, PROMETHEUS, kinds_of
from orchestrator.plan.types import JobPlan, PoolPlan
from orchestrator.replica_keeper import ReplicaKeeper
from orchestrator.store.records import StoredJob
from orchestrator.supervisor import mounts
from orchestrator.supervisor.stop import stop_job
from orchestrator.supervisor.watch import Watch
from tests.benchmarks.processes import free_port_range
from tests.fakes.fake_launch import FakeFleet
from tests.stack.weights.volume import program
from tests.unit.orchestrator.samples import CPU, facts_of, pd_data, spec_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

LENT = 32 << 20
CLIENT_TTL_S = 5
"""Until a master forgets a client that it does not hear of."""
STORAGE = ("storage-prefill-0", "storage-decode-0")
RECOVERS_WITHIN_S = 30.0
PORTS = 64


@dataclass
class Pool:
    """A job of everything but engines and router, its watch and its keeper."""

    fleet: FakeFleet
    watch: Watch
    keeper: ReplicaKeeper

    @property
    def job(self) -> StoredJob:
        return self.fleet.store.get("demo")

    @property
    def plan(self) -> PoolPlan:
        assert self.job.plan.pool is not None
        return self.job.plan.pool

    def pid(self, name: str) -> int:
        return next(unit.record.pid for unit in self.job.units if unit.record.name == name)

    def kill(self, *names: str, with_signal: int = signal.SIGKILL) -> None:
        for name in names:
            os.kill(self.pid(name), with_signal)

    def kept_until(self, condition: Callable[[], bool]) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + RECOVERS_WITHIN_S, (self.watch.states, self.fleet.keeping.ends("demo"))
            list(self.watch.look())
            self.keeper.turn(is_updating=False, is_moving=False)
            time.sleep(0.05)
        return time.monotonic() - began

    def is_whole(self) -> bool:
        """All run, and the master counts what was planned: no more, no less."""
        assert self.plan.metrics_url is not None
        url, metric = self.plan.metrics_url, CAPACITY_METRIC
        planned = check(MetricProbe(url=url, metric=metric, at_least=2 * LENT), ())
        more = check(MetricProbe(url=url, metric=metric, at_least=2 * LENT + 1), ())
        return set(self.watch.states.values()) == {"ready"} and planned.ready and not more.ready


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    fleet = FakeFleet(tmp_path)
    # Processes are found by it, those of another test on this machine as well.
    fleet.record(pool_plan(tmp_path), run_id=uuid.uuid4().hex)
    backend = LocalBackend()
    job = fleet.store.get("demo")
    backend.prepare(job.run, job.plan.units, job.plan.files)
    starter = replace(fleet.starter(), backend=backend, probe=readiness.check, look_every_s=0.1)
    try:
        job = starter.bring_up("demo", fleet.shown.append)
        watch = Watch(store=fleet.store, keeping=fleet.keeping, backend=backend, probe=readiness.check, job=job)
        keeper = ReplicaKeeper(
            store=fleet.store,
            keeping=fleet.keeping,
            watch=watch,
            job=job,
            write_files=lambda _files: None,
            look_outside=outside,
            let_handoffs_end=lambda *_: None,
        )
        yield Pool(fleet, watch, keeper)
    finally:
        stop_job(fleet.store, backend, "demo")


def pool_plan(folder: Path) -> JobPlan:
    """As `build_plan` has it, without engines and router."""
    abilities = replace(
        CPU,
        python=sys.executable,
        mooncake_master=program("mooncake_master"),
        mooncake_client=program("mooncake_client"),
    )
    lent = {"kv_offload": {"cpu": {"num_bytes": LENT}}}
    data = pd_data(
        roles={"prefill": lent, "decode": lent},
        pool={"master_flags": {"client_ttl": CLIENT_TTL_S}},
        ports={"base": free_port_range(PORTS)},
        monitoring={"enabled": True},
    )
    facts = facts_of(abilities=abilities, job_dir=str(folder / "jobs" / "demo"))
    plan = build_plan(spec_of(data), facts)
    kinds = kinds_of(plan)
    units = tuple(unit for unit in plan.units if kinds[unit.name] not in ("engine", "router"))
    return replace(plan, units=units, engines=())


def outside(plan: JobPlan) -> Outside:
    """Nobody asks the router, which is not there."""
    return replace(look_outside(plan), replicas={})


@pytest.fixture
def engine_store(pool: Pool) -> Iterator[Any]:
    """A store client as an engine has it, opened before anything dies."""
    for name, value in TCP_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", pool.plan.master_address) == 0
    yield store
    store.close()


def saves(store: Any, key: str) -> bool:
    return bool(store.put(key, b"kv" * 1000) == 0 and len(store.get(key)) == 2000)


def test_a31_a_master_that_was_killed_has_its_members_back(pool: Pool, engine_store: Any) -> None:
    clients = [pool.pid(name) for name in STORAGE]
    assert saves(engine_store, "job.1@before")
    pool.kill(MASTER)
    assert pool.kept_until(lambda: pool.fleet.keeping.ends("demo").keys() == {MASTER}) < 10
    pool.kept_until(pool.is_whole)
    assert [pool.pid(name) for name in STORAGE] == clients, "they come back by themselves"
    # Its first call finds the connection to the dead master.
    pool.kept_until(lambda: saves(engine_store, "job.1@after"))
    asked = PoolClient(
        python=pool.plan.python, master_address=pool.plan.master_address, metrics_url=pool.plan.metrics_url
    )
    assert asked.count_keys("job.1@", 5) == 1, "what the master had before is gone"
    assert asked.purge_epoch("job", 1, 20) == 1
    assert asked.count_keys("", 5) == 0


@pytest.mark.parametrize("killed", [STORAGE[:1], (*STORAGE, MASTER)])
def test_storage_clients_that_were_killed_lend_again_what_was_planned(
    pool: Pool, engine_store: Any, killed: tuple[str, ...]
) -> None:
    before = {name: pool.pid(name) for name in killed}
    pool.kill(*killed)
    pool.kept_until(lambda: all(pool.pid(name) != before[name] for name in killed) and pool.is_whole())
    pool.kept_until(lambda: all(saves(engine_store, f"key-{number}") for number in range(8)))


def test_a_storage_client_that_stands_still_makes_way_for_another(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "MOUNTS_WITHIN_S", 2.0)
    before = pool.pid(STORAGE[0])
    pool.kill(STORAGE[0], with_signal=signal.SIGSTOP)
    pool.kept_until(lambda: pool.pid(STORAGE[0]) != before and pool.is_whole())


def test_prometheus_is_started_again_and_nothing_else_is(pool: Pool) -> None:
    others = {name: pool.pid(name) for name in (MASTER, *STORAGE)}
    before = pool.pid(PROMETHEUS)
    pool.kill(PROMETHEUS)
    pool.kept_until(lambda: pool.pid(PROMETHEUS) != before and pool.is_whole())
    assert {name: pool.pid(name) for name in others} == others
