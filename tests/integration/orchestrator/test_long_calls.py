"""Calls that take long, of a control plane with one thread for all routes: they hold it no longer than others do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest

from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.service import JobService
from orchestrator.weights.audit import Audited
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator import kept_fleet
from tests.integration.orchestrator.kept_fleet import SOURCE, until
from tests.integration.orchestrator.serving import serving

TOKEN = "the-token"
SIGNED_IN = {"authorization": f"Bearer {TOKEN}"}
Ask = Callable[..., Future[httpx.Response]]


class HeldAudits(JobService):
    """Its audits end when they are told to."""

    begun = threading.Semaphore(0)
    may_end = threading.Event()

    def audit(self, name: str, most: int) -> tuple[Audited, ...]:
        self.begun.release()
        assert self.may_end.wait(30)
        return ()


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return kept_fleet.serving(FakeFleet(tmp_path))


@pytest.fixture
def service(fleet: FakeFleet) -> HeldAudits:
    return HeldAudits(**vars(fleet.service()))


@pytest.fixture
def ask(service: HeldAudits) -> Iterator[Ask]:
    """Calls in threads, each over a connection of its own."""
    app = build_app(service, Access({TOKEN: "admin"}))

    async def of_one_thread(scope: Any, receive: Any, send: Any) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        await app(scope, receive, send)

    with serving(of_one_thread) as client, ThreadPoolExecutor(8) as beside:

        def call(method: str, path: str, **given: Any) -> Future[httpx.Response]:
            url = f"{client.base_url}{path}"
            return beside.submit(httpx.request, method, url, headers=SIGNED_IN, timeout=20, trust_env=False, **given)

        yield call


def threads(name: str) -> int:
    return sum(name in thread.name for thread in threading.enumerate())


def test_stops_that_wait_for_open_requests(fleet: FakeFleet, ask: Ask) -> None:
    """Each is a client that asks again because nobody has answered it yet."""
    fleet.open_requests.set()
    stops = [ask("DELETE", "/jobs/demo?mode=drain") for _ in range(4)]
    until(lambda: fleet.drains == 1)
    assert ask("GET", "/jobs").result().status_code == 200
    assert threads("demo:run-1:stop") == 1
    stops.append(ask("DELETE", "/jobs/demo"))
    assert [stop.result().json()["phase"] for stop in stops] == ["stopped"] * 5
    assert fleet.drains == 1


def test_a_stop_whose_processes_do_not_end_says_so_to_all_who_wait(fleet: FakeFleet, ask: Ask) -> None:
    fleet.open_requests.set()
    fleet.machine.undying = {"decode-0"}
    stops = [ask("DELETE", "/jobs/demo?mode=drain") for _ in range(2)]
    until(lambda: fleet.drains == 1)
    assert ask("GET", "/jobs").result().status_code == 200
    fleet.open_requests.clear()
    for stop in stops:
        assert "these processes could not be ended" in stop.result().json()["detail"]
    fleet.machine.undying = set()
    assert ask("DELETE", "/jobs/demo").result().json()["phase"] == "stopped"


def test_audits(service: HeldAudits, ask: Ask) -> None:
    service.may_end.clear()
    audits = [ask("POST", "/jobs/demo/audit", json={"requests": 2}) for _ in range(3)]
    assert service.begun.acquire(timeout=10)
    assert ask("GET", "/jobs").result().status_code == 200
    assert threads("audit 2 of demo") == 1
    service.may_end.set()
    assert [audit.result().status_code for audit in audits] == [200] * 3


def test_a_trainer_that_waits_for_its_update(fleet: FakeFleet, ask: Ask) -> None:
    fleet.receivers.silent = {"prefill-0"}
    path = "/jobs/demo/rlhf"
    assert ask("POST", f"{path}/start_weight_update").result().status_code == 200
    assert ask("POST", f"{path}/update_weights", json={"update_info": {"source": SOURCE}}).result().status_code == 200
    finish = ask("POST", f"{path}/finish_weight_update")
    until(lambda: fleet.weights().history("demo", 1) != [])
    assert ask("GET", f"{path}/weight_info").result().json() == {"weight_version": "initial"}
    fleet.receivers.silent = set()
    assert finish.result().json()["weight_version"] == "step-1"
