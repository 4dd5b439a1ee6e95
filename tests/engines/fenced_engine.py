"""A colocated engine of the tiny model as the planner makes it, run by the local launcher, behind its fence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.engine_client import CommandOrder, EngineClient
from deploy.local.backend import LocalBackend
from deploy.logs import tail
from deploy.probe import check
from deploy.unit import LaunchUnit, RunContext, UnitRecord
from orchestrator.observe.cluster import collect_facts
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.types import EnginePlan
from orchestrator.store.tokens import write_fresh_token
from orchestrator.supervisor.log_cause import likely_cause
from tests.e2e.harness import job_table
from tests.fakes.tiny_model import make_tiny_model
from tests.unit.orchestrator.samples import spec_of

REPOSITORY = Path(__file__).parents[2]
PORTS = {"base": 9480}
BOOT_S = 300
STOP_GRACE_S = 10
CALL_TIMEOUT_S = 120
EPOCH = 5
OWN_MIDDLEWARE = "starlette.middleware.gzip.GZipMiddleware"


@dataclass
class Engine:
    """One planned engine and its present life."""

    plan: EnginePlan
    unit: LaunchUnit
    run: RunContext
    backend: LocalBackend
    record: UnitRecord | None = None

    def start(self) -> UnitRecord:
        self.record = self.backend.start(self.run, self.unit)
        return self.record

    def wait_ready(self) -> None:
        assert self.record is not None
        deadline = time.monotonic() + BOOT_S
        while not check(self.unit.probe, ()).ready:
            if not self.alive() or time.monotonic() > deadline:
                log = tail(self.record.log, 400)
                print(*log[-60:], sep="\n")
                pytest.fail(f"the engine has ended or is not ready in time: {likely_cause(log)}", pytrace=False)
            time.sleep(0.3)

    def alive(self) -> bool:
        assert self.record is not None
        return self.backend.poll(self.run, [self.record])[self.unit.name].alive

    def exit_code(self) -> int | None:
        assert self.record is not None
        return self.backend.poll(self.run, [self.record])[self.unit.name].exit_code

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        if self.record is not None:
            assert self.backend.stop(self.run, [self.record], grace_s) == ()

    @property
    def token(self) -> dict[str, str]:
        return {"authorization": f"Bearer {Path(self.plan.token_file).read_text(encoding='ascii').strip()}"}

    def call(self, method: str, path: str, headers: dict[str, str], body: Any = None, **more: Any) -> httpx.Response:
        url = f"{self.plan.url}{path}"
        return httpx.request(method, url, headers=headers, json=body, timeout=CALL_TIMEOUT_S, trust_env=False, **more)

    def fence(self) -> dict[str, Any]:
        view: dict[str, Any] = self.call("GET", "/fence", self.token).json()
        return view

    def right_headers(self) -> dict[str, str]:
        """Of a leg as the router sends it."""
        instance = self.fence()["instance"]
        return {**self.token, "x-headrace-instance": instance, "x-headrace-epoch": str(EPOCH), "x-headrace-salted": "1"}

    def confirm(self, order: CommandOrder) -> None:
        with EngineClient(self.plan.url, self.plan.token_file) as client:
            client.confirm_epoch(client.fence().instance, EPOCH, order)


def planned_engine(folder: Path) -> Engine:
    """A colocated engine of the tiny model as the planner makes it, its files written."""
    model = make_tiny_model(REPOSITORY / ".cache" / "models" / "tiny-qwen3")
    table = job_table("fenced", model, 9489, roles={"colocated": {}}, monitoring={"enabled": False}, ports=PORTS)
    table["engine"]["middleware"] = OWN_MIDDLEWARE
    spec = spec_of(table)
    plan = build_plan(spec, collect_facts(spec, folder, frozenset(), backends=("local",)))
    refuse_errors(plan)
    write_fresh_token(Path(plan.engines[0].token_file))
    run = RunContext(job="fenced", run_id=f"fenced-{folder.name}", log_dir=folder / "logs")
    unit = next(unit for unit in plan.units if unit.name == plan.engines[0].name)
    backend = LocalBackend()
    backend.prepare(run, [unit], plan.files)
    return Engine(plan=plan.engines[0], unit=unit, run=run, backend=backend)
