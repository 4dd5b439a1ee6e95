"""The control API behind a real server, over a service on fakes; every error is a problem as RFC 9457 has it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.access import Access
from orchestrator.api.guard import MAX_BODY_BYTES
from orchestrator.api.problems import Problem
from orchestrator.api.server import build_app
from orchestrator.errors import Complaint, HeadraceError
from tests.fakes.fake_launch import NOW, FakeFleet
from tests.integration.orchestrator.kept_fleet import signed_in
from tests.integration.orchestrator.serving import local_port, serving
from tests.unit.orchestrator.samples import pd_data

NOBODY = Access({})
TOML = """
name = "demo"
[model]
path = "/models/small"
[roles.colocated]
[monitoring]
enabled = false
"""


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    with signed_in(serve(build_app(fleet.service(), Access({"a-token": "admin"}))), "a-token") as client:
        yield client
    settle(fleet)


def settle(fleet: FakeFleet) -> None:
    """Starts and stops run in threads; none may outlive its test."""
    deadline = time.monotonic() + 10
    while any(fleet.service().is_driven(name) for name in fleet.store.names()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(fleet: FakeFleet, phase: str) -> None:
    deadline = time.monotonic() + 10
    while fleet.store.get("demo").phase != phase:
        assert time.monotonic() < deadline, fleet.store.get("demo")
        time.sleep(0.01)
    settle(fleet)


def problem(reply: httpx.Response, status: int) -> dict[str, Any]:
    """Every answer that is no success has this shape, and none shows our insides."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = reply.json()
    assert Problem.model_validate(body).model_dump() == body
    assert body["status"] == status
    assert body["instance"] == reply.url.raw_path.decode().partition("?")[0]
    assert body["title"]
    assert body["detail"]
    assert "Traceback" not in reply.text
    return body


def test_a_job_on_a_full_disk_is_stopped_and_the_stale_record_said(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.running()
    fleet.database.is_full = True
    assert "its record still says 'ready'" in problem(api.delete("/jobs/demo"), 500)["detail"]
    assert fleet.machine.living == {}


def test_start_look_list_stop(fleet: FakeFleet, api: httpx.Client) -> None:
    reply = api.post("/jobs", json=pd_data())
    assert reply.status_code == 202
    assert reply.json()["name"] == "demo"
    wait_for(fleet, "ready")
    shown = api.get("/jobs/demo").json()
    assert shown["phase"] == "ready"
    assert {unit["state"] for unit in shown["units"]} == {"ready"}
    assert [engine["role"] for engine in shown["engines"]] == ["prefill", "decode"]
    assert shown["pool"]["capacity_bytes"] == 256 << 20
    assert [job["name"] for job in api.get("/jobs").json()["jobs"]] == ["demo"]
    stopped = api.delete("/jobs/demo")
    assert stopped.status_code == 200
    assert stopped.json()["phase"] == "stopped"
    assert fleet.machine.living == {}


def test_a_toml_body(fleet: FakeFleet, api: httpx.Client) -> None:
    reply = api.post("/jobs", content=TOML, headers={"content-type": "application/toml; charset=utf-8"})
    assert reply.status_code == 202
    wait_for(fleet, "ready")


def test_a_stop_that_is_not_waited_for_is_on_record_when_it_is_answered(fleet: FakeFleet, api: httpx.Client) -> None:
    api.post("/jobs", json=pd_data())
    wait_for(fleet, "ready")
    reply = api.delete("/jobs/demo", params={"wait": "false"})
    assert reply.status_code == 202
    assert reply.json()["phase"] in ("stopping", "stopped")
    wait_for(fleet, "stopped")


def test_a_failed_start_says_why(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.opening.failure = "the router did not open its gate: answered 500"
    assert api.post("/jobs", json=pd_data()).status_code == 202
    wait_for(fleet, "failed")
    assert "did not open its gate: answered 500" in api.get("/jobs/demo").json()["reason"]


def test_a_start_may_be_asked_for_again(fleet: FakeFleet, api: httpx.Client) -> None:
    api.post("/jobs", json=pd_data())
    wait_for(fleet, "ready")
    started = list(fleet.machine.started)
    again = api.post("/jobs", json={**pd_data(), "ports": {}, "launch.ready_timeout": "15m"})
    assert (again.status_code, again.json()["phase"]) == (200, "ready")
    assert again.json()["spec_hash"] == api.get("/jobs/demo").json()["spec_hash"]
    assert fleet.machine.started == started


def test_two_starts_at_once_are_one(fleet: FakeFleet, api: httpx.Client) -> None:
    post = partial(httpx.post, f"{api.base_url}/jobs", json=pd_data(), headers=api.headers, trust_env=False)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: post(), range(4)))
    # One of them has begun the job, and only that one ends it again when it is interrupted.
    assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 202]
    wait_for(fleet, "ready")
    assert sorted(fleet.machine.started) == sorted(unit.name for unit in fleet.plan().units)


def test_another_job_file_under_the_name_of_a_living_job(fleet: FakeFleet, api: httpx.Client) -> None:
    api.post("/jobs", json=pd_data())
    wait_for(fleet, "ready")
    found = problem(api.post("/jobs", json=pd_data(router={"retries": 5}, env={"HF_TOKEN": "hf_abcdefgh"})), 409)
    assert "already recorded as ready, from another job file" in found["detail"]
    assert {one["field"]: one["problem"] for one in found["errors"]} == {
        "env.HF_TOKEN": 'is not set in the recorded job, and "(left out)" here',
        "router.retries": "is not set in the recorded job, and 5 here",
    }


def test_a_job_that_is_being_stopped_is_not_started_again_yet(fleet: FakeFleet, api: httpx.Client) -> None:
    job = fleet.running()
    fleet.store.set_phase("demo", job.run_id, "stopping", "", NOW)
    assert "already recorded as stopping" in problem(api.post("/jobs", json=pd_data()), 409)["detail"]


def test_a_job_file_with_a_wrong_field(api: httpx.Client) -> None:
    found = problem(api.post("/jobs", json=pd_data(models={"path": "x"})), 422)
    assert [one["field"] for one in found["errors"]] == ["models"]
    assert "model" in found["errors"][0]["mend"]


@pytest.mark.parametrize("key", ["body", "syntax"])
def test_an_unknown_key_is_a_wrong_field_whatever_its_name(api: httpx.Client, key: str) -> None:
    problem(api.post("/jobs", json=pd_data(**{key: 1})), 422)


def test_a_plan_that_must_not_run(api: httpx.Client) -> None:
    found = problem(api.post("/jobs", json=pd_data(roles={"prefill": {"engine": {"block_size": 64}}})), 422)
    assert "block_size" in found["errors"][0]["field"]


def test_a_backend_that_is_not_here(api: httpx.Client) -> None:
    problem(api.post("/jobs", json=pd_data(launch={"backend": "slurm"})), 422)


@pytest.mark.parametrize("method", ["get", "delete"])
def test_an_unknown_job(api: httpx.Client, method: str) -> None:
    assert "recorded jobs: none" in problem(api.request(method, "/jobs/nobody"), 404)["detail"]
    problem(api.delete("/jobs/nobody", params={"wait": "false"}), 404)


def test_an_unknown_route_and_a_wrong_method(api: httpx.Client) -> None:
    problem(api.get("/no/such/route"), 404)
    reply = api.put("/jobs")
    problem(reply, 405)
    assert set(reply.headers["allow"].split(", ")) <= {"GET", "POST"}


def test_a_parameter_that_is_none(api: httpx.Client) -> None:
    found = problem(api.delete("/jobs/demo", params={"wait": "perhaps", "limit_s": "-1"}), 422)["errors"]
    assert {one["field"]: one["mend"] for one in found} == {
        "query.wait": "give true or false",
        "query.limit_s": "give a number, above 0 and at most 86400 or null",
    }


def test_a_body_that_does_not_fit_says_what_does(api: httpx.Client) -> None:
    push = "/jobs/demo/weights"
    for body, field, mend in (
        (b"{", "body.1", "send well-formed JSON"),
        (b"{}", "body.source", "give an object"),
        (b'{"source": {}, "strategy": "all"}', "body.strategy", 'give "barrier" or "rolling" or null'),
        (b'{"source": {}, "strategie": "barrier"}', "body.strategie", "did you mean 'strategy'?"),
        (b"", "body", "give an object with source"),
    ):
        found = problem(api.post(push, content=body, headers={"content-type": "application/json"}), 422)["errors"]
        assert [(one["field"], one["mend"]) for one in found] == [(field, mend)]


@pytest.mark.parametrize("path", ["processes/router/restart", "replicas/decode-0/drain", "audit"])
def test_a_body_that_has_only_defaults_may_be_left_out(api: httpx.Client, path: str) -> None:
    assert "no job is called 'nobody'" in problem(api.post(f"/jobs/nobody/{path}"), 404)["detail"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xff\xfe\x00", id="not UTF-8"),
        pytest.param(b'{"name": "demo", "mod', id="truncated"),
        pytest.param(b'{"name": "\\ud800"}', id="half a surrogate pair"),
        pytest.param(b"[1, 2]", id="no object"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"a": 1, "a": 2}', id="a key twice"),
        pytest.param(b"[" * 100_000, id="nested too deep"),
        pytest.param(b'{"a": NaN}', id="no number"),
    ],
)
def test_a35_a_body_that_is_no_job_file(api: httpx.Client, fleet: FakeFleet, body: bytes) -> None:
    refused = api.post("/jobs", content=body, headers={"content-type": "application/json"})
    assert problem(refused, 400)["errors"]
    after = api.get("/health")
    assert after.json() == {"status": "ok"}
    assert local_port(after) == local_port(refused)
    assert fleet.store.names() == []


def test_a_toml_body_that_nests_without_brackets(api: httpx.Client, fleet: FakeFleet) -> None:
    body = b"[" + b"a." * 5_000 + b"a]\n"
    refused = api.post("/jobs", content=body, headers={"content-type": "application/toml"})
    assert "nested too deep" in problem(refused, 400)["detail"]
    assert fleet.store.names() == []


def test_a_body_larger_than_any_job_file(api: httpx.Client) -> None:
    assert str(MAX_BODY_BYTES) in problem(api.post("/jobs", content=b"x" * (MAX_BODY_BYTES + 1)), 413)["detail"]


def test_a_token_is_asked_for_everywhere_but_at_the_health_route(
    fleet: FakeFleet, serve: Callable[[Any], httpx.Client]
) -> None:
    client = serve(build_app(fleet.service(), Access({"secret": "admin"}, "tokens are in the file /home/api-token")))
    assert client.get("/health").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        reply = client.get("/jobs", headers=headers)
        assert problem(reply, 401)["detail"].endswith("; tokens are in the file /home/api-token")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert client.get("/jobs", headers={"authorization": "Bearer secret"}).json() == {"jobs": []}


@pytest.mark.parametrize(("caller", "is_told"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False), ("", False)])
def test_where_tokens_are_is_told_on_this_machine_alone(fleet: FakeFleet, caller: str, is_told: bool) -> None:
    transport = httpx.ASGITransport(build_app(fleet.service(), Access({}, "see /home/api-token")), client=(caller, 1))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
            return await client.get("/jobs")

    assert ("/home/api-token" in problem(asyncio.run(ask()), 401)["detail"]) == is_told


def broken(raises: Exception) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise raises

    return call


def test_an_error_that_nobody_foresaw_is_json_and_shows_nothing(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.store.heads = broken(ZeroDivisionError("/secret/path"))  # type: ignore[method-assign]
    reply = api.get("/jobs")
    del fleet.store.heads
    assert "unexpected ZeroDivisionError" in problem(reply, 500)["detail"]
    assert "secret" not in reply.text
    after = api.get("/jobs")
    assert after.status_code == 200
    assert local_port(after) == local_port(reply)


def test_an_error_of_ours_keeps_its_text(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.store.heads = broken(HeadraceError(str(Complaint(field="x", problem="y", mend="z"))))  # type: ignore[method-assign]
    reply = api.get("/jobs")
    del fleet.store.heads
    assert problem(reply, 500)["detail"] == "x: y; z"


def test_a_start_that_was_left_is_taken_over(fleet: FakeFleet) -> None:
    fleet.record()
    with serving(build_app(fleet.service(), NOBODY)):
        wait_for(fleet, "ready")
    assert sorted(fleet.machine.started) == sorted(unit.name for unit in fleet.plan().units)


def test_a_stop_that_was_left_is_finished(fleet: FakeFleet) -> None:
    job = fleet.running()
    fleet.store.set_phase("demo", job.run_id, "stopping", "", NOW)
    with serving(build_app(fleet.service(), NOBODY)):
        wait_for(fleet, "stopped")
    assert fleet.machine.living == {}


def test_a_start_that_another_process_drives_is_left_to_it(fleet: FakeFleet) -> None:
    service = fleet.service()
    admission = service.admit(fleet.spec())
    with serving(build_app(service, NOBODY)):
        time.sleep(0.1)
        assert fleet.machine.started == []
    service.drive(admission, fleet.shown.append)
    assert sorted(fleet.machine.started) == sorted(unit.name for unit in fleet.plan().units)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_a_web_page_could_post_unasked_is_refused(api: httpx.Client, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    refused = api.post("/jobs", content=json.dumps(pd_data()), headers=headers)
    assert "application/json" in problem(refused, 415)["detail"]
