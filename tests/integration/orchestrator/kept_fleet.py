"""A job of two pairs of engines that serves, on threads and a real record, and what tests ask of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import httpx

from connectors.types import Role
from orchestrator.all_jobs import AllJobs
from orchestrator.store.keeping import ReplicaRequest
from orchestrator.store.records import StoredJob
from orchestrator.supervisor.restarts import RestartPolicy
from orchestrator.weight_service import PushOptions
from tests.fakes.fake_launch import FakeFleet

ENGINES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
LIMITS = {"grace": 0.05, "again": 0.02, "tries": 2, "drain": 5}
SOURCE = {"transport": "path", "version": "step-1", "path": "/checkpoints/step-1"}
QUICK = RestartPolicy(first_pause_s=0.001, longest_pause_s=0.001, steady_s=30.0, budget=3)
STEADY = replace(QUICK, steady_s=0.0)
"""No life is one of a crash loop."""


def serving(fleet: FakeFleet, *, launch: Mapping[str, object] | None = None, **limits: float) -> FakeFleet:
    """All its processes run, and it serves."""
    fleet.record(fleet.plan(weights={"limits": {**LIMITS, **limits}}, launch=launch or {}))
    fleet.supervision().open(fleet.bring_up())

    def start(name: str) -> None:
        role = ENGINES.get(name.partition("-")[0])
        if name in fleet.receivers.router.replicas:
            fleet.receivers.boot(name)
        elif role is not None:
            fleet.receivers.add(name, role)

    fleet.machine.on_start = start
    return fleet


@contextmanager
def supervised(fleet: FakeFleet) -> Iterator[None]:
    stopping = threading.Event()
    thread = threading.Thread(target=AllJobs(fleet.service(), stopping).keep)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@contextmanager
def signed_in(client: httpx.Client, token: str) -> Iterator[httpx.Client]:
    """The shared client, with a token for as long as this lasts."""
    client.headers["authorization"] = f"Bearer {token}"
    try:
        yield client
    finally:
        del client.headers["authorization"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def lives(fleet: FakeFleet, name: str) -> int:
    return fleet.machine.started.count(name)


def usable(fleet: FakeFleet) -> set[str]:
    return {name for name, each in (fleet.receivers.outside().replicas or {}).items() if each.usable}


def impatient(fleet: FakeFleet) -> FakeFleet:
    """It serves, and what does not serve is not waited for any longer after 1.5 seconds."""
    return serving(fleet, launch={"ready_timeout": 1.2}, drain=0.1, pause=0.1, load=0.1)


def pushed(fleet: FakeFleet) -> None:
    """It serves weights that an engine which comes up has to load."""
    weights = fleet.weights()
    assert weights.wait("demo", weights.push("demo", None, SOURCE, PushOptions()).number, 10).outcome == "committed"


def ended(fleet: FakeFleet, request: ReplicaRequest) -> ReplicaRequest:
    return fleet.replicas().wait("demo", request.number, 10)


def job_of(fleet: FakeFleet) -> StoredJob:
    return fleet.store.get("demo")
