"""The one place where implementations are chosen and wired."""

from __future__ import annotations

from pathlib import Path

from deploy import probe as readiness
from deploy.local.backend import LocalBackend
from orchestrator.observe.cluster import collect_facts, socket_dir
from orchestrator.observe.engines import RunningEngines
from orchestrator.service import JobService
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore
from orchestrator.supervisor.router_gate import HttpGate


def local_service(home: Path) -> JobService:
    """The service of this machine; its state lies in `home`."""
    return JobService(
        store=JobStore(Database(home)),
        backend=LocalBackend,
        facts=collect_facts,
        socket_dir=socket_dir,
        probe=readiness.check,
        questions=RunningEngines(),
        gate=HttpGate(),
    )
