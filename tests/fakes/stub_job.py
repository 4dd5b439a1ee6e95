"""Jobs of real processes that compute nothing: each listens on a port of its own (`stub_process.py`)."""

from __future__ import annotations

import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from deploy.local.backend import LocalBackend
from deploy.unit import ListenProbe
from orchestrator.plan.types import JobPlan
from orchestrator.store.jobs import JobStore
from orchestrator.store.records import StoredJob
from tests.unit.orchestrator.samples import BARE, facts_of, plan_of

PROCESSES = ("prefill-0", "decode-0", "router")
STUB = Path(__file__).with_name("stub_process.py")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def stub_plan(
    home: Path, name: str, ports: Sequence[int], *habits: str, silent: str = "", stop_grace_s: float = 10.0
) -> JobPlan:
    """Of `PROCESSES`, each on one of the ports. `habits`: further arguments of each process; `silent`: one that never
    becomes ready."""
    table = {**BARE, "name": name, "roles": {"prefill": {}, "decode": {}}}
    facts = facts_of(job_dir=str(home / "jobs" / name))
    plan = plan_of(table, replace(facts, socket_dir=home / "sockets" / name))
    units = [
        replace(
            unit,
            argv=(sys.executable, str(STUB), "--bind" if unit.name == silent else "--listen", str(port), *habits),
            env={},
            unset_env=(),
            ports=(),
            port_ranges=(),
            probe=ListenProbe(port=port),
            stop_grace_s=stop_grace_s,
        )
        for unit, port in zip(plan.units, ports, strict=True)
    ]
    # Its own ports are nobody's: many such jobs have the same ones in their plans.
    return replace(plan, units=tuple(units), ports={})


def record(store: JobStore, plan: JobPlan) -> StoredJob:
    """As starting."""
    folder = store.folder(plan.job)
    # Not one that another test has too: its processes are found by it.
    store.create(plan, run_id=uuid.uuid4().hex, directory=folder, now=time.time())
    return store.get(plan.job)


def run(store: JobStore, backend: LocalBackend, plan: JobPlan) -> StoredJob:
    """A job that has come up, as far as its record and its processes go."""
    job = record(store, plan)
    for unit in plan.units:
        started = backend.start(job.run, unit)
        store.add_unit(job.name, job.run_id, started, time.time())
        store.set_ready(job.name, job.run_id, unit.name, time.time())
    store.set_phase(job.name, job.run_id, "ready", "", time.time())
    return store.get(job.name)
