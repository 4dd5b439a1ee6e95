"""One server for all tests here: each puts its own app behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator import replica_keeper
from orchestrator.control.local import LocalControlPlane
from orchestrator.control.plane import ControlPlane
from orchestrator.supervisor import restarts
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator import kept_fleet
from tests.integration.orchestrator.planes import served
from tests.integration.orchestrator.serving import Forwarder, serving


@pytest.fixture(scope="session")
def shared_server() -> Iterator[tuple[Forwarder, httpx.Client]]:
    forwarder = Forwarder()
    with serving(forwarder) as client:
        yield forwarder, client


@pytest.fixture
def serve(shared_server: tuple[Forwarder, httpx.Client]) -> Callable[[Any], httpx.Client]:
    """Puts an app behind the server; its lifespan is not run."""
    forwarder, client = shared_server

    def put(app: Any) -> httpx.Client:
        forwarder.app = app
        return client

    return put


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are looked for at once, and what ended is started again at once."""
    monkeypatch.setattr(replica_keeper, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(restarts, "POLICIES", dict.fromkeys(restarts.POLICIES, kept_fleet.QUICK))


@pytest.fixture
def two_pairs(tmp_path: Path, quick: None) -> FakeFleet:
    """A job of two pairs of engines that serves; nobody supervises it yet."""
    return kept_fleet.serving(FakeFleet(tmp_path, pairs=2))


@pytest.fixture(params=["local", "http"])
def control(request: pytest.FixtureRequest, fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> ControlPlane:
    """Over the `fleet` of the module: from its state folder, and by its API."""
    return LocalControlPlane(fleet.service()) if request.param == "local" else served(fleet, serve)
