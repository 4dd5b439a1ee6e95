"""The one place where implementations are chosen and wired."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploy import probe as readiness
from deploy.local.backend import Children, LocalBackend
from deploy.local.process_table import SharedReading
from orchestrator.observe.cluster import collect_facts
from orchestrator.observe.engines import RunningEngines
from orchestrator.observe.outside import let_handoffs_end, look_outside, replicas_of
from orchestrator.observe.pool import pool_use
from orchestrator.observe.router import let_requests_end, not_ready, router_traffic
from orchestrator.plan.types import JobPlan
from orchestrator.replica_service import ReplicaService
from orchestrator.service import JobService
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import KeepingStore
from orchestrator.store.updates import UpdateStore
from orchestrator.supervision import Supervision
from orchestrator.weight_service import WeightService
from orchestrator.weights.acts import Command
from orchestrator.weights.events import Event
from orchestrator.weights.receivers import Receivers

BACKENDS = ("local",)
"""Those of `launch.backend` that jobs can be started with."""


def local_service(home: Path) -> JobService:
    """The service of this machine; its state lies in `home`."""
    database = Database(home)
    store, updates = JobStore(database), UpdateStore(database)
    keeping = KeepingStore(database)
    # Whoever starts a process and whoever watches it have a backend each, and both are asked how it ended.
    children: Children = {}
    backend = partial(LocalBackend, SharedReading(), children)
    facts = partial(collect_facts, backends=BACKENDS)
    supervision = Supervision(
        store=store,
        updates=updates,
        backend=backend,
        probe=readiness.check,
        carry_out=_carry_out,
        not_ready=not_ready,
        keeping=keeping,
        look_outside=look_outside,
        let_handoffs_end=let_handoffs_end,
    )
    return JobService(
        store=store,
        backends=BACKENDS,
        backend=backend,
        facts=facts,
        probe=readiness.check,
        questions=RunningEngines(),
        pool_use=pool_use,
        router_traffic=router_traffic,
        open_job=supervision.open,
        let_requests_end=let_requests_end,
        replicas=ReplicaService(
            store=store, keeping=keeping, supervision=supervision, replicas=replicas_of, facts=facts
        ),
        weights=WeightService(store=store, updates=updates, supervision=supervision),
    )


def _carry_out(plan: JobPlan) -> Callable[[Command], Event]:
    return Receivers(plan=plan).carry_out
