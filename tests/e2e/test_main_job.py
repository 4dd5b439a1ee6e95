"""The main job on real parts, started, looked at and stopped over HTTP with curl: what users of a first job rely on.

1 prefill engine that lends the pool its capacity, 1 decode engine at zero capacity, NIXL between them, one Mooncake
master, the router, Prometheus.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.engine_client import CommandOrder, EngineClient
from monitoring.dashboards.overview import overview
from monitoring.dashboards.panels import expressions
from tests.e2e.conversations import WITH_DECODE_SAVES, Measured, Turns, assert_same, first_turns, measure
from tests.e2e.harness import (
    CALL_TIMEOUT_S,
    POOL_BYTES,
    UP_TIMEOUT_S,
    Headrace,
    engine_url,
    job_token,
    metric,
    run_pids,
    split_job,
    wait_until,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

NAME = "main-job"
ROUTER_PORT = 9431
CONTROL_PORT = 9439
TOKEN = "a-token-of-this-test"
CONTROL_URL = f"http://127.0.0.1:{CONTROL_PORT}"


def curl(*arguments: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON body, as a user would fetch them."""
    authorization = f"Authorization: Bearer {TOKEN}"
    command = ["curl", "-sS", "-m", "120", "-w", "\n%{http_code}", "-H", authorization, *arguments]
    if body is not None:
        command += ["-H", "content-type: application/json", "--data-binary", "@-"]
    text = json.dumps(body) if body is not None else ""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=150, check=True)
    reply, _, code = done.stdout.rpartition("\n")
    return int(code), json.loads(reply)


@pytest.fixture(scope="module")
def control(headrace: Headrace) -> Iterator[str]:
    """`headrace serve`, running."""
    command = headrace.command("serve", "--port", str(CONTROL_PORT))
    environment = {**headrace.environment, "HEADRACE_API_TOKEN": TOKEN}
    log = headrace.home / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_until("the control API answers", lambda: _answers(f"{CONTROL_URL}/health"))
        yield CONTROL_URL
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def job(control: str, headrace: Headrace, tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The job's status once it is ready; stopped over HTTP at the end, with nothing left of it."""
    table = split_job(NAME, tiny_model, ROUTER_PORT, weights={})
    code, started = curl("-X", "POST", f"{control}/jobs", body=table)
    assert code == 202, started
    assert (started["name"], started["phase"]) == (NAME, "starting")
    try:
        # The engine of the reference starts beside those of the job: no test may ask for it before the job.
        request.getfixturevalue("reference")
        yield _wait_ready(control)
    finally:
        code, stopped = curl("-X", "DELETE", f"{control}/jobs/{NAME}")
        assert (code, stopped["phase"]) == (200, "stopped")
        assert {unit["state"] for unit in stopped["units"]} <= {"dead", "waiting"}


def _wait_ready(control: str) -> dict[str, Any]:
    deadline = time.monotonic() + UP_TIMEOUT_S
    while True:
        code, status = curl(f"{control}/jobs/{NAME}")
        assert code == 200
        assert status["phase"] not in ("failed", "stopped"), status["reason"]
        assert "offload" not in status["reason"]
        if status["phase"] == "ready":
            return status
        assert time.monotonic() < deadline, status
        time.sleep(1)


def test_only_prefill_lends_capacity(job: dict[str, Any]) -> None:
    names = [unit["name"] for unit in job["units"]]
    assert [name for name in names if name.startswith("storage")] == ["storage-prefill-0"]
    assert job["pool"]["capacity_bytes"] == POOL_BYTES
    assert metric(job["pool"]["metrics_url"], "master_total_capacity_bytes") == POOL_BYTES


@pytest.fixture(scope="module")
def measured(job: dict[str, Any]) -> Measured:
    return measure(job, WITH_DECODE_SAVES)


def test_outputs_equal_a_colocated_engine(reference: Turns, measured: Measured) -> None:
    assert_same(measured.turns, reference)


def test_pool_gives_back_prompt_and_completion(measured: Measured) -> None:
    assert measured.external_hits == WITH_DECODE_SAVES


def test_both_engines_took_part(measured: Measured) -> None:
    assert {answer.prefill for answer in measured.turns.second} == {"prefill-0"}
    assert {answer.decode for answer in measured.turns.second} == {"decode-0"}


def test_chat_streams_to_its_end(job: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True}
    url = f"{job['router']['url']}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=CALL_TIMEOUT_S, trust_env=False)
    assert whole.json()["usage"]["completion_tokens"] == 6
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=CALL_TIMEOUT_S, trust_env=False) as reply:
        events = [line for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas)


def test_engine_refusal_reaches_the_client(job: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": [5] * 4000, "max_tokens": 4}
    reply = httpx.post(f"{job['router']['url']}/v1/completions", json=body, timeout=CALL_TIMEOUT_S, trust_env=False)
    assert reply.status_code == 400
    assert "maximum context length" in reply.json()["error"]["message"]


def test_every_dashboard_expression_returns_data(job: dict[str, Any], measured: Measured) -> None:
    """From the job's own Prometheus, which scraped router, plan, engines and master."""
    wanted = {query: _concrete(query) for query in expressions(overview(NAME))}
    assert wanted
    missing: list[str] = []

    def all_answer() -> bool:
        missing[:] = [query for query, concrete in wanted.items() if not _samples(job["prometheus_url"], concrete)]
        return not missing

    wait_until(lambda: f"these return data: {missing}", all_answer)


def _concrete(query: str) -> str:
    """Grafana fills these in before it asks."""
    return query.replace("$__rate_interval", "1m").replace("$__interval", "30s")


def _samples(prometheus_url: str, query: str) -> list[Any]:
    reply = httpx.get(f"{prometheus_url}/api/v1/query", params={"query": query}, timeout=30, trust_env=False)
    assert reply.status_code == 200, (query, reply.text)
    samples: list[Any] = reply.json()["data"]["result"]
    return [sample for sample in samples if sample["value"][1] != "NaN"]


def test_same_job_is_not_started_twice(control: str, job: dict[str, Any], tiny_model: Path) -> None:
    code, again = curl("-X", "POST", f"{control}/jobs", body=split_job(NAME, tiny_model, ROUTER_PORT, weights={}))
    assert (code, again["spec_hash"]) == (200, job["spec_hash"])
    code, refused = curl("-X", "POST", f"{control}/jobs", body=split_job(NAME, tiny_model, ROUTER_PORT))
    assert (code, refused["title"]) == (409, "Job differs")
    assert [one["field"] for one in refused["errors"]] == ["weights"]


def test_cli_sees_the_job_started_over_http(headrace: Headrace, job: dict[str, Any]) -> None:
    status = headrace.status(NAME)
    assert status["phase"] == "ready"
    assert {unit["state"] for unit in status["units"]} == {"ready"}
    shown = headrace.run("logs", NAME, "router", timeout_s=60)
    assert shown.returncode == 0
    assert "serving on port" in shown.stdout


def test_processes_carry_the_run_mark(headrace: Headrace, job: dict[str, Any]) -> None:
    leaders = {unit["pid"] for unit in job["units"]}
    marks = {Path(f"/proc/{pid}/environ").read_bytes().partition(b"HEADRACE_RUN_ID=")[2][:32] for pid in leaders}
    assert len(marks) == 1
    assert leaders <= run_pids(marks.pop().decode())


def test_an_engine_of_the_job_takes_new_weights(job: dict[str, Any], tiny_model: Path, reference: Turns) -> None:
    """The same ones under a name, so that the epoch still holds and the job goes on."""
    url = engine_url(job, "decode-0")
    source = {"transport": "path", "version": "v1", "path": str(tiny_model)}
    with EngineClient(url, str(Path(job["directory"], "token")), timeout_s=CALL_TIMEOUT_S) as engine:
        fence = engine.fence()
        assert engine.weights().version is None
        _post(job, f"{url}/pause?mode=abort&clear_cache=false")
        answer = engine.load_weights(fence.instance, source, CommandOrder(update=1, attempt=0, step=1))
        _post(job, f"{url}/resume")
        assert (answer.ok, answer.error) == (True, "")
        assert engine.fence().epoch is None
        assert fence.epoch is not None
        engine.confirm_epoch(fence.instance, fence.epoch, CommandOrder(update=1, attempt=0, step=2))
        assert engine.weights().version == "v1"
    again = first_turns(job["router"]["url"])
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in reference.first]


def _post(job: dict[str, Any], url: str) -> None:
    httpx.post(url, headers=job_token(job), timeout=CALL_TIMEOUT_S, trust_env=False).raise_for_status()
