"""The control API's routes about single processes behind a real server, over a supervised job on model engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import signed_in, supervised

TOKEN = "the-token"


@pytest.fixture
def fleet(two_pairs: FakeFleet) -> FakeFleet:
    return two_pairs


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    with supervised(fleet), signed_in(serve(build_app(fleet.service(), Access({TOKEN: "admin"}))), TOKEN) as client:
        yield client


def outcome(fleet: FakeFleet, reply: httpx.Response) -> str | None:
    assert reply.status_code == 202, reply.text
    return fleet.replicas().wait("demo", reply.json()["number"], 10).outcome


def test_a_replica_is_restarted_drained_and_undrained(fleet: FakeFleet, api: httpx.Client) -> None:
    restarted = api.post("/jobs/demo/processes/decode-1/restart")
    assert (restarted.json()["kind"], restarted.json()["process"]) == ("restart", "decode-1")
    assert outcome(fleet, restarted) == "done"
    assert fleet.machine.started.count("decode-1") == 2
    assert outcome(fleet, api.post("/jobs/demo/replicas/decode-0/drain", json={"force": False})) == "done"
    assert "decode-0 is drained" in api.get("/jobs/demo").json()["reason"]
    assert outcome(fleet, api.post("/jobs/demo/replicas/decode-0/undrain")) == "done"
    shown = api.get("/jobs/demo/requests").json()["requests"]
    assert [(each["kind"], each["outcome"]) for each in shown] == [
        ("restart", "done"),
        ("drain", "done"),
        ("undrain", "done"),
    ]
    assert api.get("/jobs/demo/requests/1").json() == shown[0]
    assert api.get("/jobs/demo/requests", params={"limit": 2}).json() == {"requests": shown[1:]}
    assert api.get("/jobs/demo/requests", params={"limit": 0}).status_code == 422


def test_the_traffic_of_a_job_is_what_its_router_says(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.receivers.legs = {"decode-1": 3}
    told = api.get("/jobs/demo/traffic").json()
    assert (told["router"]["gate"], told["router"]["admitted"], told["router_unknown"]) == ("open", 3, "")
    replicas = {each["name"]: each for each in told["router"]["replicas"]}
    assert set(replicas) == set(fleet.receivers.engines)
    assert (replicas["decode-1"]["legs_in_flight"], replicas["decode-1"]["epoch"]) == (3, 1)
    fleet.service().stop("demo")
    assert api.get("/jobs/demo/traffic").json() == {"router": None, "router_unknown": "the job is stopped"}
    assert api.get("/jobs/nobody/traffic").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/jobs/nobody/processes/router/restart", {}, 404, "no job is called"),
        ("/jobs/demo/processes/decode-7/restart", {}, 404, "no process 'decode-7'"),
        ("/jobs/demo/processes/router/restart", {}, 409, "the job has one router"),
        ("/jobs/demo/replicas/router/drain", {}, 404, "no replica 'router'"),
        ("/jobs/demo/replicas/decode-0/undrain", {}, 409, "decode-0 is not drained"),
        ("/jobs/demo/replicas/decode-0/drain", {"forced": True}, 422, "forced"),
    ],
)
def test_what_cannot_be_is_a_problem(api: httpx.Client, path: str, body: Any, status: int, says: str) -> None:
    reply = api.post(path, json=body)
    assert reply.status_code == status
    assert says in reply.json()["detail"]


def test_a_request_that_nobody_made_is_unknown(api: httpx.Client) -> None:
    reply = api.get("/jobs/demo/requests/5")
    assert (reply.status_code, reply.json()["detail"]) == (404, "job 'demo' has no request 5")
