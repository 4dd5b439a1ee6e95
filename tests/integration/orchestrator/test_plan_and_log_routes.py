"""What the control API shows without changing anything, and how a record goes; behind a real server, on fakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api import routes_logs
from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.plan.types import plan_from_json
from orchestrator.store.records import StoredJob
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import signed_in
from tests.unit.orchestrator.samples import pd_data

SECRET = "hf_abcdefgh1234"


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    with signed_in(serve(build_app(fleet.service(), Access({"a-token": "admin"}))), "a-token") as client:
        yield client


def test_a_job_file_that_can_be_used(fleet: FakeFleet, api: httpx.Client) -> None:
    reply = api.post("/validate", json=pd_data())
    assert (reply.status_code, reply.json()) == (200, {"is_usable": True, "errors": [], "warnings": []})
    assert fleet.store.names() == []


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"rooter": {}, "router": {"port": 0}}, {"rooter", "router.port"}),
        (
            {"roles": {"prefill": {"engine": {"block_size": 64}}}, "pool": {"lease_ttl": "1ms"}},
            {"roles.prefill.engine.block_size", "pool.lease_ttl"},
        ),
        ({"ports": {"base": 32767}}, {"ports.base"}),
    ],
)
def test_all_that_is_wrong_with_a_job_file(
    api: httpx.Client, fleet: FakeFleet, changes: dict[str, Any], fields: set[str]
) -> None:
    verdict = api.post("/validate", json=pd_data(**changes)).json()
    assert not verdict["is_usable"]
    assert {one["field"] for one in verdict["errors"]} >= fields
    assert fleet.store.names() == []


def test_a_body_that_is_no_job_file_is_not_judged(api: httpx.Client) -> None:
    assert api.post("/validate", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert api.post("/render", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_a_rendered_plan_is_whole_and_without_secrets(fleet: FakeFleet, api: httpx.Client) -> None:
    data = pd_data(env={"HF_TOKEN": SECRET, "OMP_NUM_THREADS": "2"}, engine={"hf_token": SECRET})
    reply = api.post("/render", json=data)
    plan = plan_from_json(reply.text)
    engine = next(unit for unit in plan.units if unit.name == "decode-0")
    assert (engine.env["HF_TOKEN"], engine.env["OMP_NUM_THREADS"]) == ("(left out)", "2")
    assert [found.field for found in plan.errors] == ["engine.hf_token"]
    assert SECRET not in reply.text
    assert fleet.store.names() == []
    assert not fleet.store.folder("demo").exists()


@pytest.mark.parametrize("value", ["decode", "colocated", "127.0.0.1", "mooncake", "a", "{}", "(left out)"])
def test_a_secret_that_is_an_everyday_word(api: httpx.Client, value: str) -> None:
    reply = api.post("/render", json=pd_data(env={"A_TOKEN": value}))
    plan = plan_from_json(reply.text)
    assert plan.spec.env == {"A_TOKEN": "(left out)"}
    assert [engine.role for engine in plan.engines] == ["prefill", "decode"]


def test_a_plan_that_cannot_be_laid_out(api: httpx.Client) -> None:
    reply = api.post("/render", json=pd_data(roles={"decode": {"kv_offload": {"cpu": {"num_bytes": "much"}}}}))
    assert reply.status_code == 422
    assert [one["field"] for one in reply.json()["errors"]] == ["roles.decode.kv_offload.cpu.num_bytes"]


def test_how_much_of_the_pool_is_used(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.running()
    pool = api.get("/jobs/demo").json()["pool"]
    assert pool["use"] == {"mounted_bytes": 256 << 20, "used_bytes": 1 << 20, "keys": 3}
    assert pool["use_unknown"] == ""


def test_a_master_that_does_not_answer(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.running()
    fleet.pool_use = "GET http://127.0.0.1:9003/metrics: timed out"
    pool = api.get("/jobs/demo").json()["pool"]
    assert (pool["use"], pool["use_unknown"]) == (None, "GET http://127.0.0.1:9003/metrics: timed out")


def test_the_record_of_an_ended_job_is_deleted(fleet: FakeFleet, api: httpx.Client) -> None:
    job = fleet.running()
    assert "stop it first" in api.delete("/jobs/demo/record").json()["detail"]
    api.delete("/jobs/demo")
    assert api.delete("/jobs/demo/record").status_code == 204
    assert fleet.store.names() == []
    assert job.run.log_dir.exists()
    assert api.delete("/jobs/demo/record").status_code == 404


@pytest.fixture
def job(fleet: FakeFleet) -> StoredJob:
    fleet.machine.log_text = "".join(f"line {number}\n" for number in range(200))
    return fleet.running()


@pytest.mark.parametrize(("query", "lines"), [({}, 100), ({"tail": 3}, 3), ({"tail": 0}, 0), ({"tail": 1000}, 200)])
def test_the_end_of_a_log(api: httpx.Client, job: StoredJob, query: dict[str, Any], lines: int) -> None:
    reply = api.get("/jobs/demo/logs/decode-0", params=query)
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.text.splitlines() == [f"line {number}" for number in range(200 - lines, 200)]


def test_logs_that_cannot_be_shown(api: httpx.Client, job: StoredJob) -> None:
    unknown = api.get("/jobs/demo/logs/decode-7")
    assert unknown.status_code == 404
    assert "it has: mooncake-master, storage-prefill-0, prefill-0, decode-0, router" in unknown.json()["detail"]
    assert api.get("/jobs/nobody/logs/router").status_code == 404
    assert api.get("/jobs/demo/logs/..%2f..%2f..%2fheadrace").status_code == 404
    assert api.get("/jobs/demo/logs/router", params={"tail": 10_001}).status_code == 422


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_logs, "LOOK_EVERY_S", 0.01)


@pytest.mark.usefixtures("eager")
def test_a_followed_log_goes_on_until_its_job_ends(fleet: FakeFleet, api: httpx.Client, job: StoredJob) -> None:
    seen: list[str] = []
    with api.stream("GET", "/jobs/demo/logs/decode-0", params={"follow": "true", "tail": 1}) as reply:
        lines = reply.iter_lines()
        seen.append(next(lines))
        with job.log_of("decode-0").open("a") as log:
            log.write("more\n")
        seen.append(next(lines))
        with job.log_of("decode-0").open("a") as log:
            log.write("the last words")
        fleet.service().stop("demo")
        seen += lines
    assert seen == ["line 199", "more", "the last words"]


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often followers have looked."""
    looks: list[int] = []
    has_ended = routes_logs._has_ended
    monkeypatch.setattr(routes_logs, "_has_ended", lambda *given: looks.append(1) or has_ended(*given))
    return looks


@pytest.mark.usefixtures("eager")
def test_a_follower_that_left_is_not_served_on(
    fleet: FakeFleet, api: httpx.Client, job: StoredJob, following: list[int]
) -> None:
    url = f"{api.base_url}/jobs/demo/logs/decode-0?follow=true"
    with httpx.stream("GET", url, headers=api.headers, trust_env=False) as reply:
        assert next(reply.iter_lines()) == "line 100"
    deadline = time.monotonic() + 10
    while True:
        before = len(following)
        time.sleep(0.2)
        if len(following) == before:
            return
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("eager")
def test_followers_hold_nobody_up(api: httpx.Client, job: StoredJob, fleet: FakeFleet) -> None:
    """More of them than the server has threads."""
    url = f"{api.base_url}/jobs/demo/logs/decode-0?follow=true&tail=1"
    begun = threading.Barrier(61)

    def follow() -> None:
        with httpx.stream("GET", url, headers=api.headers, trust_env=False, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            begun.wait(30)
            list(lines)

    threads = [threading.Thread(target=follow) for _ in range(60)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    assert api.get("/jobs/demo").json()["phase"] == "ready"
    fleet.service().stop("demo")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
