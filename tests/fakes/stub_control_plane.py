"""A control plane as `headrace serve` runs it, whose jobs are real processes that do nothing. Run as a script:

    stub_control_plane HOME PORT [TOKENS]

Its launcher, state folder, supervision and HTTP server are the real ones. What a plan would start is replaced by a
process that writes a line and sleeps; what would be asked of engines, routers and pools is answered by models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from connectors.pool_client import PoolUse
from deploy.local.backend import LocalBackend
from deploy.probe import ProbeResult
from deploy.unit import LaunchUnit, PlannedFile, Probe, RunContext, UnitRecord
from orchestrator.cli_serve import run_server
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.kinds import ROUTER
from orchestrator.plan.types import JobPlan
from orchestrator.replica_service import ReplicaService
from orchestrator.service import JobService
from orchestrator.spec.job import JobSpec
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import KeepingStore
from orchestrator.store.updates import UpdateStore
from orchestrator.supervision import Supervision
from orchestrator.weight_service import WeightService
from orchestrator.weights.audit import Audited
from tests.fakes.fake_launch import FakeQuestions, UnsyncedDatabase
from tests.fakes.fake_receivers import FakeReceivers
from tests.unit.orchestrator.samples import facts_of


class ModelFleets(dict[str, FakeReceivers]):
    """Engines and routers by job, as they are asked; each run of a job has its own."""

    def of(self, plan: JobPlan) -> FakeReceivers:
        fleet = self.setdefault(plan.job, FakeReceivers({engine.name: engine.role for engine in plan.engines}))
        for engine in plan.engines:
            if engine.name not in fleet.engines:
                fleet.add(engine.name, engine.role)
        return fleet


class HarmlessBackend(LocalBackend):
    """The real launcher, given other programs."""

    def __init__(self, fleets: ModelFleets) -> None:
        super().__init__()
        self._fleets = fleets

    def prepare(self, run: RunContext, units: Sequence[LaunchUnit], files: Sequence[PlannedFile]) -> None:
        # Else it is a running job that is scaled.
        if any(unit.name == ROUTER for unit in units):
            self._fleets.pop(run.job, None)
        super().prepare(run, [_harmless(unit) for unit in units], files)

    def start(self, run: RunContext, unit: LaunchUnit) -> UnitRecord:
        record = super().start(run, _harmless(unit))
        fleet = self._fleets.get(run.job)
        if fleet is not None and unit.name in fleet.router.replicas:
            fleet.boot(unit.name)
        return record


def _harmless(unit: LaunchUnit) -> LaunchUnit:
    return replace(unit, argv=("/bin/sh", "-c", 'echo "$0 runs"; exec sleep 1000', unit.name))


class UnauditedService(JobService):
    """Its routers cannot be asked anything."""

    def audit(self, name: str, most: int) -> tuple[Audited, ...]:
        self.store.get(name)
        return ()


def stub_service(home: Path) -> JobService:
    def facts(_spec: JobSpec, job_dir: Path, reserved: frozenset[int]) -> ClusterFacts:
        given = facts_of(job_dir=str(job_dir), reserved_ports=reserved)
        return replace(given, socket_dir=home / "sockets" / job_dir.name)

    def probe(_probe: Probe, members: Sequence[int]) -> ProbeResult:
        return ProbeResult(ready=bool(members), detail="it runs")

    fleets = ModelFleets()
    backend = partial(HarmlessBackend, fleets)
    database = UnsyncedDatabase(home)
    store, updates, keeping = JobStore(database), UpdateStore(database), KeepingStore(database)
    supervision = Supervision(
        store=store,
        updates=updates,
        backend=backend,
        probe=probe,
        carry_out=lambda plan: fleets.of(plan).carry_out,
        not_ready=lambda _router: None,
        keeping=keeping,
        look_outside=lambda plan: fleets.of(plan).outside(),
        let_handoffs_end=lambda _engine, _limit_s: None,
    )
    return UnauditedService(
        store=store,
        backends=("local",),
        backend=backend,
        facts=facts,
        probe=probe,
        questions=FakeQuestions(),
        pool_use=lambda pool: PoolUse(mounted_bytes=pool.capacity_bytes, used_bytes=0, keys=0),
        router_traffic=lambda _router: "it has no router",
        open_job=supervision.open,
        let_requests_end=lambda _router, _is_wanted: None,
        replicas=ReplicaService(
            store=store,
            keeping=keeping,
            supervision=supervision,
            replicas=lambda plan: fleets.of(plan).outside().replicas,
            facts=facts,
        ),
        weights=WeightService(store=store, updates=updates, supervision=supervision),
    )


if __name__ == "__main__":
    state, port, *tokens = sys.argv[1:]
    run_server(stub_service(Path(state)), Path(state), "127.0.0.1", int(port), Path(tokens[0]) if tokens else None)
