"""The fence in a real engine, started as a plan says: every route, every rule, and a restart behind the same port."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.engine_client import CommandOrder, EngineClient
from connectors.vllm_plugin.fence_rules import route_kind
from deploy.local.backend import LocalBackend
from deploy.logs import tail
from deploy.probe import check
from deploy.unit import LaunchUnit, RunContext, UnitRecord
from orchestrator.observe.cluster import collect_facts
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.types import EnginePlan
from orchestrator.store.tokens import write_fresh_token
from orchestrator.supervisor.log_cause import likely_cause
from tests.e2e.harness import job_table, wait_until
from tests.fakes.tiny_model import make_tiny_model
from tests.unit.orchestrator.samples import spec_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
PORTS = {"base": 9480}
BOOT_S = 300
STOP_GRACE_S = 10
CALL_TIMEOUT_S = 120
EPOCH = 5
OWN_MIDDLEWARE = "starlette.middleware.gzip.GZipMiddleware"
CONTROL = {
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weights",
    "/reset_prefix_cache",
    "/abort_requests",
    "/sleep",
}
"""Open to everybody with vLLM's --api-key alone."""
NOT_IN_THE_SCHEMA = [
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/fence"),
    ("POST", "/fence"),
]


@dataclass
class Engine:
    """One planned engine and its present life."""

    plan: EnginePlan
    unit: LaunchUnit
    run: RunContext
    backend: LocalBackend
    record: UnitRecord | None = None

    def start(self) -> UnitRecord:
        self.record = self.backend.start(self.run, self.unit)
        return self.record

    def wait_ready(self) -> None:
        assert self.record is not None
        deadline = time.monotonic() + BOOT_S
        while not check(self.unit.probe, ()).ready:
            assert self.alive(), "\n".join(tail(self.record.log, 40))
            assert time.monotonic() < deadline, "\n".join(tail(self.record.log, 40))
            time.sleep(0.3)

    def alive(self) -> bool:
        assert self.record is not None
        return self.backend.poll(self.run, [self.record])[self.unit.name].alive

    def exit_code(self) -> int | None:
        assert self.record is not None
        return self.backend.poll(self.run, [self.record])[self.unit.name].exit_code

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        if self.record is not None:
            assert self.backend.stop(self.run, [self.record], grace_s) == ()

    @property
    def token(self) -> dict[str, str]:
        return {"authorization": f"Bearer {Path(self.plan.token_file).read_text(encoding='ascii').strip()}"}

    def call(self, method: str, path: str, headers: dict[str, str], body: Any = None, **more: Any) -> httpx.Response:
        url = f"{self.plan.url}{path}"
        return httpx.request(method, url, headers=headers, json=body, timeout=CALL_TIMEOUT_S, trust_env=False, **more)

    def fence(self) -> dict[str, Any]:
        view: dict[str, Any] = self.call("GET", "/fence", self.token).json()
        return view

    def right_headers(self) -> dict[str, str]:
        """Of a leg as the router sends it."""
        instance = self.fence()["instance"]
        return {**self.token, "x-headrace-instance": instance, "x-headrace-epoch": str(EPOCH), "x-headrace-salted": "1"}

    def confirm(self, order: CommandOrder) -> None:
        with EngineClient(self.plan.url, self.plan.token_file) as client:
            client.confirm_epoch(client.fence().instance, EPOCH, order)


def planned_engine(folder: Path) -> Engine:
    """A colocated engine of the tiny model as the planner makes it, its files written."""
    model = make_tiny_model(REPOSITORY / ".cache" / "models" / "tiny-qwen3")
    table = job_table("fenced", model, 9489, roles={"colocated": {}}, monitoring={"enabled": False}, ports=PORTS)
    table["engine"]["middleware"] = OWN_MIDDLEWARE
    spec = spec_of(table)
    plan = build_plan(spec, collect_facts(spec, folder, frozenset()))
    refuse_errors(plan)
    write_fresh_token(Path(plan.engines[0].token_file))
    run = RunContext(job="fenced", run_id=f"fenced-{folder.name}", log_dir=folder / "logs")
    unit = next(unit for unit in plan.units if unit.name == plan.engines[0].name)
    backend = LocalBackend()
    backend.prepare(run, [unit], plan.files)
    return Engine(plan=plan.engines[0], unit=unit, run=run, backend=backend)


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """As it boots: no epoch is confirmed yet. The tests of this module go on with it in their order."""
    engine = planned_engine(tmp_path_factory.mktemp("fenced"))
    try:
        engine.start()
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def engine(booted: Engine) -> Engine:
    """With its epoch confirmed."""
    booted.confirm(CommandOrder(update=1, attempt=0, step=0))
    return booted


BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
SALTED = {**BODY, "cache_salt": "s"}


def listed_routes(engine: Engine) -> list[tuple[str, str]]:
    schema = engine.call("GET", "/openapi.json", engine.token).raise_for_status().json()
    return [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]


def test_every_route_of_the_running_engine_asks_for_the_token(booted: Engine) -> None:
    routes = [*listed_routes(booted), *NOT_IN_THE_SCHEMA]
    assert CONTROL | {"/health", "/v1/completions", "/inference/v1/generate"} <= {path for _, path in routes}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answers = {(method, path): booted.call(method, path, headers).status_code for method, path in routes}
        assert set(answers.values()) == {401}, answers


def test_no_request_generates_before_an_epoch_is_confirmed(booted: Engine) -> None:
    assert booted.fence()["epoch"] is None
    generating = [(method, path) for method, path in listed_routes(booted) if route_kind(method, path) == "generating"]
    assert {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"} <= {path for _, path in generating}
    answers = {(method, path): booted.call(method, path, booted.right_headers()) for method, path in generating}
    assert {reply.status_code for reply in answers.values()} == {503}, answers
    assert {reply.json()["error"]["type"] for reply in answers.values()} == {"fenced"}


def test_observation_needs_the_token_alone(booted: Engine) -> None:
    for path in ("/health", "/metrics", "/version", "/v1/models", "/is_paused"):
        reply = booted.call("GET", path, booted.token)
        assert reply.status_code == 200, path
        assert reply.headers["x-headrace-instance"] == booted.fence()["instance"]
    assert booted.call("POST", "/tokenize", booted.token, {"model": "tiny", "prompt": "a"}).status_code == 200


def test_the_middleware_of_the_job_file_is_loaded_too(booted: Engine) -> None:
    reply = booted.call("GET", "/metrics", {**booted.token, "accept-encoding": "gzip"})
    assert reply.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"x-headrace-instance": "of-another-life"}, "x-headrace-instance"),
        ({"x-headrace-epoch": "4"}, "x-headrace-epoch"),
        ({"x-headrace-salted": ""}, "x-headrace-salted"),
    ],
)
def test_a_request_that_names_something_else_is_refused(engine: Engine, changed: dict[str, str], param: str) -> None:
    reply = engine.call("POST", "/v1/completions", engine.right_headers() | changed, SALTED)
    assert (reply.status_code, reply.json()["error"]["param"]) == (503, param)
    assert reply.headers["retry-after"]


def test_a_right_request_is_served(engine: Engine) -> None:
    reply = engine.call("POST", "/v1/completions", engine.right_headers(), SALTED)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    assert reply.headers["x-headrace-epoch"] == str(EPOCH)


def test_the_token_route_is_served(engine: Engine) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}, "cache_salt": "s"}
    reply = engine.call("POST", "/inference/v1/generate", engine.right_headers(), body)
    assert reply.status_code == 200, reply.text


def test_a_stream_is_open_until_its_client_leaves(engine: Engine) -> None:
    headers = engine.right_headers() | {"x-request-id": "stream-1", "accept-encoding": "identity"}
    body = {**SALTED, "max_tokens": 900, "stream": True}
    url = f"{engine.plan.url}/v1/completions"
    with httpx.stream("POST", url, headers=headers, json=body, timeout=CALL_TIMEOUT_S, trust_env=False) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        assert engine.fence()["open_requests"] == ["stream-1"]
    wait_until("the request has ended", lambda: engine.fence()["open_requests"] == [])


def test_a_paused_engine_refuses_until_it_is_resumed(engine: Engine) -> None:
    right = engine.right_headers()
    params = {"mode": "keep", "clear_cache": "false"}
    assert engine.call("POST", "/pause", engine.token, params=params).status_code == 200
    refused = engine.call("POST", "/v1/completions", right, SALTED)
    assert (refused.status_code, refused.json()["error"]["param"]) == (503, "pause")
    assert engine.call("POST", "/resume", engine.token).status_code == 200
    assert engine.call("POST", "/v1/completions", right, SALTED).status_code == 200


def test_a41_an_engine_that_comes_back_on_its_port_refuses_the_former_epoch(engine: Engine) -> None:
    """It loaded the weights from the disk; what still names the former life must not be computed with them."""
    former = engine.right_headers()
    assert engine.call("POST", "/v1/completions", former, SALTED).status_code == 200
    engine.stop(grace_s=0)
    engine.start()
    engine.wait_ready()
    reply = engine.call("POST", "/v1/completions", former, SALTED)
    assert reply.status_code == 503
    assert "no epoch is confirmed" in reply.json()["error"]["message"]
    assert reply.headers["x-headrace-instance"] != former["x-headrace-instance"]
    engine.confirm(CommandOrder(update=1, attempt=0, step=1))
    assert engine.call("POST", "/v1/completions", former, SALTED).status_code == 503
    assert engine.call("POST", "/v1/completions", engine.right_headers(), SALTED).status_code == 200


@pytest.mark.full
def test_an_engine_without_a_token_does_not_serve(booted: Engine, tmp_path: Path) -> None:
    """Runs last: it takes the port of the others."""
    booted.stop()
    engine = planned_engine(tmp_path)
    Path(engine.plan.token_file).write_text("\n")
    record = engine.start()
    try:
        wait_until("the engine has ended", lambda: not engine.alive(), BOOT_S)
        assert engine.exit_code() not in (0, None)
        cause = likely_cause(tail(record.log, 400))
        assert f"HEADRACE_TOKEN_FILE={engine.plan.token_file}: the file is empty" in cause
    finally:
        engine.stop()
