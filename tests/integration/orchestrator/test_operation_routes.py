"""Operations over HTTP: polled, followed to their end, listed and cancelled; a stop that lets requests finish first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator import replica_keeper
from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from tests.fakes.fake_launch import NOW, FakeFleet
from tests.integration.orchestrator.kept_fleet import signed_in, supervised
from tests.unit.orchestrator.samples import pd_data

TOKENS = {"a-token": "admin", "t-token": "trainer"}
LIMITS = {"grace": 0.05, "again": 0.02, "tries": 1, "drain": 5}
SOURCE = {"transport": "path", "version": "step-1", "path": "/checkpoints/1"}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(replica_keeper, "LOOK_EVERY_S", 0.01)
    fleet = FakeFleet(tmp_path, pairs=2)
    fleet.machine.on_start = lambda name: fleet.receivers.boot(name) if name in fleet.receivers.engines else None
    return fleet


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    with supervised(fleet), signed_in(serve(build_app(fleet.service(), Access(TOKENS))), "a-token") as client:
        yield client
        fleet.open_requests.clear()
        fleet.receivers.silent = set()
        for name in fleet.store.names():
            assert client.delete(f"/jobs/{name}").status_code == 200


@pytest.fixture
def serving(fleet: FakeFleet) -> FakeFleet:
    """With a job that serves."""
    fleet.record(fleet.plan(weights={"limits": LIMITS}))
    fleet.supervision().open(fleet.bring_up())
    return fleet


def begun(reply: httpx.Response) -> str:
    """The URL of the operation that an answer names."""
    assert reply.status_code == 202, reply.text
    assert reply.headers["location"] == f"/operations/{reply.json()['operation']}"
    return reply.headers["location"]


def ended(api: httpx.Client, url: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while (found := api.get(url).json())["state"] in ("pending", "running"):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert found["ended_at"] is not None
    return dict(found)


def problem(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["detail"])


def test_a_start_and_a_stop_are_polled_and_listed(fleet: FakeFleet, api: httpx.Client) -> None:
    start = begun(api.post("/jobs", json=pd_data()))
    found = ended(api, start)
    assert (found["kind"], found["state"], found["url"]) == ("start", "succeeded", "/jobs/demo")
    assert "has ended: succeeded" in problem(api.post(f"{start}/cancel"), 409)
    stop = begun(api.delete("/jobs/demo", params={"wait": "false"}))
    assert ended(api, stop)["state"] == "succeeded"
    assert ended(api, start)["state"] == "succeeded"
    listed = api.get("/operations").json()["operations"]
    assert [each["kind"] for each in listed] == ["stop", "start"]
    assert api.get("/operations", params={"state": "failed"}).json() == {"operations": []}
    assert problem(api.get("/operations", params={"job": "nobody"}), 404)


def test_a_start_that_is_cancelled_leaves_nothing(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.probe.never_ready = {"router"}
    start = begun(api.post("/jobs", json=pd_data()))
    assert api.post(f"{start}/cancel").status_code == 202
    assert ended(api, start)["state"] == "cancelled"
    assert fleet.machine.living == {}
    assert fleet.store.get("demo").phase == "stopped"


def test_an_update_is_followed_to_its_end(serving: FakeFleet, api: httpx.Client) -> None:
    update = begun(api.post("/jobs/demo/weights", json={"source": SOURCE}))
    seen = []
    with api.stream("GET", f"{update}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: ")]
    assert (seen[-1]["state"], seen[-1]["text"]) == ("succeeded", "version step-1 is served")
    assert seen[-1]["asked_at"] <= seen[-1]["begun_at"] <= seen[-1]["ended_at"]
    assert api.get(update).json() == seen[-1]


def test_an_update_is_cancelled_by_a_trainer_and_nothing_else_is(serving: FakeFleet, api: httpx.Client) -> None:
    serving.receivers.silent = {"prefill-0"}
    update = begun(api.post("/jobs/demo/weights", json={"source": SOURCE}))
    as_trainer = {"authorization": "Bearer t-token"}
    assert api.post(f"{update}/cancel", headers=as_trainer).status_code == 202
    assert problem(api.post("/operations/demo:run-1:start/cancel", headers=as_trainer), 403)
    serving.receivers.silent = set()
    assert ended(api, update)["state"] == "cancelled"


def test_a_request_that_waits_is_withdrawn(serving: FakeFleet, api: httpx.Client) -> None:
    serving.receivers.silent = {"prefill-0"}
    update = begun(api.post("/jobs/demo/weights", json={"source": SOURCE}))
    deadline = time.monotonic() + 20
    while api.get(update).json()["state"] == "pending":
        assert time.monotonic() < deadline
    restart = begun(api.post("/jobs/demo/processes/decode-1/restart", json={}))
    assert api.get(restart).json()["state"] == "pending"
    pending = api.get("/operations", params={"job": "demo", "state": "pending"}).json()["operations"]
    assert [each["target"] for each in pending] == ["decode-1"]
    assert api.post(f"{restart}/cancel").json()["state"] == "cancelled"
    serving.receivers.silent = set()
    assert ended(api, update)["state"] == "succeeded"
    assert serving.machine.started.count("decode-1") == 1
    assert "has ended: cancelled" in problem(api.post(f"{restart}/cancel"), 409)


@pytest.mark.parametrize(
    "operation",
    ["x", "demo:run-1:update:7", "demo:run-1:request:7", "demo:run-2:start", "nobody:run-1:start", "a:b:stop"],
)
def test_an_id_that_names_nothing(serving: FakeFleet, api: httpx.Client, operation: str) -> None:
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
        problem(api.request(method, f"/operations/{operation}{path}"), 404)


def test_a_drained_job_ends_when_its_requests_have(serving: FakeFleet, api: httpx.Client) -> None:
    serving.open_requests.set()
    stop = begun(api.delete("/jobs/demo", params={"mode": "drain", "wait": "false"}))
    assert "open requests finish" in api.get(stop).json()["text"]
    assert "does not come back" in problem(api.post(f"{stop}/cancel"), 409)
    time.sleep(0.2)
    assert serving.machine.stopped == []
    serving.open_requests.clear()
    assert ended(api, stop)["state"] == "succeeded"
    assert serving.machine.living == {}


@pytest.mark.parametrize("given", [{"mode": "now"}, {"mode": "drain", "limit_s": "0.01"}])
def test_a_drain_ends_when_that_is_asked_for_or_its_time_is_over(
    serving: FakeFleet, api: httpx.Client, given: dict[str, str]
) -> None:
    serving.open_requests.set()
    stop = begun(api.delete("/jobs/demo", params={"mode": "drain", "wait": "false"}))
    assert begun(api.delete("/jobs/demo", params={"wait": "false", **given})) == stop
    assert ended(api, stop)["state"] == "succeeded"


def test_what_cannot_be_drained_is_refused(serving: FakeFleet, api: httpx.Client) -> None:
    serving.receivers.silent = {"prefill-0"}
    update = begun(api.post("/jobs/demo/weights", json={"source": SOURCE}))
    assert "update 1 of job 'demo' is under way" in problem(api.delete("/jobs/demo", params={"mode": "drain"}), 409)
    serving.receivers.silent = set()
    ended(api, update)
    serving.record(serving.plan(name="other", router={"port": 8001}), run_id="run-2")
    told = problem(api.delete("/jobs/other", params={"mode": "drain"}), 409)
    assert "is starting: there is nothing to drain" in told


def test_a_drain_that_was_left_goes_on(serving: FakeFleet, api: httpx.Client) -> None:
    serving.store.ask_stop("demo", "run-1", drain_until=time.time() + 60, now=NOW)
    serving.service().finish_stop("demo")
    assert (serving.drains, serving.store.get("demo").phase) == (1, "stopped")
