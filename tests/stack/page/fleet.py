"""What the page shows in its tests: a real `headrace serve`, which starts a job with a real pool and a real router. Its
engines are stubs behind the real fence's rules."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from deploy.local.backend import LocalBackend
from deploy.unit import LaunchUnit
from orchestrator.plan.types import EnginePlan, JobPlan
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore
from orchestrator.store.records import SERVING
from tests.fakes.stub_job import free_ports
from tests.integration.orchestrator.serve_process import Serve, until
from tests.unit.orchestrator.samples import CPU, facts_of, pd_data, plan_of

ROOT = Path(__file__).parents[3]
JOB = "rollouts"
ENDED_JOB = "earlier"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
VIEWER = "a-viewers-token"
SESSIONS = 5


@dataclass
class Fleet:
    serve: Serve
    store: JobStore

    @property
    def page(self) -> str:
        return f"{self.serve.client.base_url}/page/"

    def push(self, version: str) -> None:
        """Bring new weights to the job; until that has ended."""
        source = {"transport": "path", "path": f"/checkpoints/{version}"}
        reply = self.serve.client.post(f"/jobs/{JOB}/weights", json={"source": source, "version": version})
        assert reply.status_code == 202, reply.text
        number = reply.json()["number"]
        until("the update ends", lambda: self.serve.get(f"/jobs/{JOB}/weights/updates/{number}")["outcome"])


@contextmanager
def running_fleet(home: Path) -> Iterator[Fleet]:
    """Ready, with requests on it."""
    serve, store = Serve(home), JobStore(Database(home))
    serve.environment["HEADRACE_VIEWER_TOKEN"] = VIEWER
    record(store, bare_plan(home, ENDED_JOB), "failed")
    plan = fleet_plan(home)
    record(store, plan, "starting")
    try:
        serve.start()
        until("the job serves", lambda: serve.get(f"/jobs/{JOB}")["phase"] in SERVING)
        with requests(plan):
            yield Fleet(serve=serve, store=store)
    finally:
        serve.close()
        backend = LocalBackend()
        for head in store.heads():
            backend.stop(head.run, head.records, 1.0)
            assert backend.sweep(head.run, (), 0.5) == ()


def record(store: JobStore, plan: JobPlan, phase: str) -> None:
    folder = store.folder(plan.job)
    run_id = uuid.uuid4().hex
    store.create(plan, run_id=run_id, directory=folder, now=time.time())
    if phase == "failed":
        store.set_phase(plan.job, run_id, "failed", f"its engine said: {HOSTILE}", time.time())


def bare_plan(home: Path, name: str) -> JobPlan:
    facts = facts_of(job_dir=str(home / "jobs" / name))
    return plan_of(pd_data(name=name), replace(facts, socket_dir=home / "sockets" / name))


def fleet_plan(home: Path) -> JobPlan:
    (port,) = free_ports(1)
    data = pd_data(
        name=JOB,
        roles={"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
        router={"port": port},
        checks={"offload_probe": "off"},
        weights={},
    )
    programs = Path(sys.executable).parent
    abilities = replace(
        CPU,
        python=sys.executable,
        mooncake_master=str(programs / "mooncake_master"),
        mooncake_client=str(programs / "mooncake_client"),
    )
    facts = facts_of(job_dir=str(home / "jobs" / JOB), abilities=abilities)
    plan = plan_of(data, replace(facts, headrace_python=sys.executable, socket_dir=home / "sockets"))
    engines = {engine.name: engine for engine in plan.engines}
    units = [_stub(unit, engines[unit.name]) if unit.name in engines else unit for unit in plan.units]
    return replace(plan, units=tuple(units))


def _stub(unit: LaunchUnit, engine: EnginePlan) -> LaunchUnit:
    port = engine.url.rpartition(":")[2]
    argv = (sys.executable, "-m", "tests.fakes.engine_process", engine.name, engine.role, port, engine.token_file)
    return replace(unit, argv=argv, env={"PYTHONPATH": str(ROOT)})


@contextmanager
def requests(plan: JobPlan) -> Iterator[None]:
    """Sessions with a request each that goes on until the end of the block."""
    client = httpx.Client(base_url=plan.router.url, timeout=600, trust_env=False)

    def ask(number: int) -> None:
        body = {"model": "small", "prompt": "hello " * 40 * number, "max_tokens": 600}
        try:
            client.post("/v1/completions", json=body, headers={"x-session-id": f"s{number}"})
        except httpx.HTTPError:
            return

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(1, SESSIONS + 1)]
    for thread in threads:
        thread.start()
    yield
    client.close()
