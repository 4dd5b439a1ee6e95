"""One server for all tests here: each puts its own app behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

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
