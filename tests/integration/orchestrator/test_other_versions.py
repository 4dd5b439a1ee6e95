"""A job of which another version has recorded something hides nothing of the others, and is said to be such a one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.weight_service import PushOptions
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import SOURCE, serving, signed_in

TOKEN = "the-token"


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    """A job that serves and was pushed to, beside one that is about to start."""
    fleet = serving(FakeFleet(tmp_path))
    fleet.weights().push("demo", None, SOURCE, PushOptions())
    fleet.supervision().keep("demo", lambda position: position.course is not None)
    fleet.record(replace(fleet.plan(name="other"), units=(), ports={}), run_id="run-2")
    return fleet


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    with signed_in(serve(build_app(fleet.service(), Access({TOKEN: "admin"}))), TOKEN) as client:
        yield client


def listed(api: httpx.Client, path: str, what: str) -> list[dict[str, Any]]:
    reply = api.get(path)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()[what]
    return found


@pytest.mark.parametrize(
    ("change", "update_is_listed"),
    [
        ("UPDATE weight_updates SET request = '{}'", False),
        ("UPDATE weight_updates SET outcome = 'enchanted'", False),
        ("UPDATE weight_positions SET position = '{}'", True),
    ],
)
def test_what_cannot_be_read_of_its_weights(
    fleet: FakeFleet, api: httpx.Client, change: str, update_is_listed: bool
) -> None:
    with fleet.database.transaction() as connection:
        connection.execute(change)
    operations = {(each["job"], each["kind"]) for each in listed(api, "/operations", "operations")}
    update = {("demo", "update")} if update_is_listed else set()
    assert operations == {("demo", "start"), ("other", "start"), *update}
    refused = api.get("/jobs/demo/weights")
    assert refused.status_code == 409
    assert "job 'demo' was recorded by another version of Headrace; stop it with" in refused.json()["detail"]


def test_events_of_an_unknown_kind(fleet: FakeFleet, api: httpx.Client) -> None:
    every = listed(api, "/events?since=0&limit=1000", "events")
    with fleet.database.transaction() as connection:
        connection.execute("UPDATE events SET kind = 'telepathy' WHERE seq = ?", (every[-1]["seq"],))
    for path in ("/events?since=0&limit=1000", "/events?limit=1000"):
        assert listed(api, path, "events") == every[:-1]
    assert listed(api, f"/jobs/{every[-1]['job']}/events?since={every[-2]['seq']}", "events") == []
