"""The fence in a real engine, started as a plan says: every route, every rule, and a restart behind the same port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from connectors.engine_client import CommandOrder
from connectors.vllm_plugin.fence_rules import route_kind
from deploy.logs import tail
from orchestrator.supervisor.log_cause import likely_cause
from tests.e2e.harness import wait_until
from tests.engines.fenced_engine import BOOT_S, CALL_TIMEOUT_S, EPOCH, Engine, planned_engine

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

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


@dataclass(frozen=True)
class Restarted:
    """An engine that served, was killed, and came back on its port."""

    engine: Engine
    former: dict[str, str]
    """Headers of a leg that the former life served."""


@pytest.fixture(scope="module")
def restarted(served: Engine) -> Iterator[Restarted]:
    """As it boots: no epoch is confirmed yet. The tests of this module go on with it in their order."""
    former = served.right_headers()
    assert served.call("POST", "/v1/completions", former, SALTED).status_code == 200
    served.stop(grace_s=0)
    served.start()
    served.wait_ready()
    yield Restarted(served, former)
    served.stop()


@pytest.fixture
def booted(restarted: Restarted) -> Engine:
    return restarted.engine


@pytest.fixture
def engine(booted: Engine) -> Engine:
    """With its epoch confirmed."""
    booted.confirm(CommandOrder(update=1, attempt=0, step=1))
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


def test_a41_an_engine_that_comes_back_on_its_port_refuses_the_former_epoch(restarted: Restarted) -> None:
    """It loaded the weights from the disk; what still names the former life must not be computed with them."""
    engine, former = restarted.engine, restarted.former
    reply = engine.call("POST", "/v1/completions", former, SALTED)
    assert reply.status_code == 503
    assert "no epoch is confirmed" in reply.json()["error"]["message"]
    assert reply.headers["x-headrace-instance"] != former["x-headrace-instance"]
    engine.confirm(CommandOrder(update=1, attempt=0, step=1))
    assert engine.call("POST", "/v1/completions", former, SALTED).status_code == 503
    assert engine.call("POST", "/v1/completions", engine.right_headers(), SALTED).status_code == 200


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
    """More than fits between a server and a client that does not read: the stream cannot end by itself."""
    headers = engine.right_headers() | {"x-request-id": "stream-1", "accept-encoding": "identity"}
    body = {**SALTED, "temperature": 1, "max_tokens": 900, "n": 64, "stream": True, "logprobs": 5}
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
