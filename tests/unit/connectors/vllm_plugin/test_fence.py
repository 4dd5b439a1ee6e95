"""The fence around a small ASGI app: token, order of events, streams, and what it will not start without."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connectors.vllm_plugin.fence import Fence, Scope, Send, StartRefused
from tests.unit.connectors.vllm_plugin.asgi import BEARER, TOKEN, Exchange, Inner, Streaming, call, scope_of

GENERATING = {"x-headrace-instance": "life-1", "x-headrace-epoch": "5", "x-headrace-salted": "1"}
CONFIRM = {"instance": "life-1", "epoch": 5, "update": 1, "attempt": 0, "step": 0}


async def confirm(fence: Fence) -> None:
    assert (await call(fence, "POST", "/fence", pieces=(json.dumps(CONFIRM).encode(),))).status == 200


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(token))
    monkeypatch.setenv("HEADRACE_INSTANCE", "life-1")
    return token


ROUTES = [("GET", "/health"), ("POST", "/v1/completions"), ("POST", "/pause"), ("GET", "/fence"), ("POST", "/fence")]


@pytest.mark.parametrize(
    "authorization",
    [None, "", TOKEN, "Bearer", "Bearer ", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \u00fc"],
)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_token(method: str, path: str, authorization: str | None) -> None:
    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        await confirm(fence)
        given = GENERATING if authorization is None else {**GENERATING, "authorization": authorization}
        exchange = await call(fence, method, path, given)
        assert exchange.status == 401
        assert exchange.headers["www-authenticate"] == "Bearer"
        assert json.loads(exchange.body)["error"]["code"] == 401
        assert inner.scopes == []
        view = json.loads((await call(fence, "GET", "/fence")).body)
        assert (view["epoch"], view["paused"]) == (5, False)

    asyncio.run(scenario())


def test_the_scheme_is_of_any_case() -> None:
    async def scenario() -> None:
        exchange = await call(Fence(Inner()), "GET", "/health", {"authorization": f"bearer {TOKEN}"})
        assert exchange.status == 200

    asyncio.run(scenario())


def test_a_request_of_this_life_and_epoch_reaches_the_engine_whole() -> None:
    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        await confirm(fence)
        exchange = await call(fence, "POST", "/v1/completions", BEARER | GENERATING, (b'{"a":', b" 1}"))
        assert (exchange.status, exchange.body) == (200, b"done")
        assert exchange.headers == {"x-inner": "yes", "x-headrace-instance": "life-1", "x-headrace-epoch": "5"}
        assert inner.bodies == [b'{"a": 1}']

    asyncio.run(scenario())


def test_a41_an_engine_that_came_back_refuses_what_names_its_former_life() -> None:
    """Same port, weights from the disk: its epoch is not confirmed, and its instance is another."""

    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        former = BEARER | GENERATING | {"x-headrace-instance": "life-0"}
        exchange = await call(fence, "POST", "/v1/completions", former)
        assert exchange.status == 503
        assert "retry-after" in exchange.headers
        assert exchange.headers["x-headrace-instance"] == "life-1"
        assert "x-headrace-epoch" not in exchange.headers
        await confirm(fence)
        assert (await call(fence, "POST", "/v1/completions", former)).status == 503
        assert inner.scopes == []

    asyncio.run(scenario())


def test_a_refused_request_is_answered_before_its_body_is_read() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        scope = scope_of("POST", "/v1/completions", BEARER)
        await Fence(Inner())(scope, exchange.receive, exchange.send)
        assert exchange.status == 503

    asyncio.run(scenario())


def test_observation_and_control_need_the_token_alone() -> None:
    async def scenario() -> None:
        fence = Fence(Inner())
        for method, path in (("GET", "/metrics"), ("POST", "/tokenize"), ("POST", "/wake_up")):
            assert (await call(fence, method, path)).status == 200

    asyncio.run(scenario())


def test_a_root_path_is_no_part_of_a_route() -> None:
    async def scenario() -> None:
        fence = Fence(Inner())
        assert (await call(fence, "GET", "/sub/health", root_path="/sub")).status == 200
        assert (await call(fence, "POST", "/sub/v1/completions", root_path="/sub")).status == 503

    asyncio.run(scenario())


def test_nothing_generates_from_a_pause_to_a_successful_resume() -> None:
    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        await confirm(fence)

        async def generate() -> int:
            return (await call(fence, "POST", "/v1/completions", BEARER | GENERATING)).status

        inner.statuses = {"/pause": 500, "/resume": 500}
        await call(fence, "POST", "/pause", path_params={}, query_string=b"mode=keep")
        assert await generate() == 503
        await call(fence, "POST", "/resume")
        assert await generate() == 503
        inner.statuses = {}
        await call(fence, "POST", "/resume")
        assert await generate() == 200

    asyncio.run(scenario())


def test_a_pause_holds_from_the_moment_it_is_received() -> None:
    async def scenario() -> None:
        inner = Streaming()
        fence = Fence(inner)
        await confirm(fence)
        pausing = asyncio.create_task(call(fence, "POST", "/pause"))
        await inner.entered.wait()
        assert (await call(fence, "POST", "/v1/completions", BEARER | GENERATING)).status == 503
        inner.release.set()
        await pausing

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/pause", "/resume"])
def test_a_pause_or_resume_that_comes_too_late_does_nothing(path: str) -> None:
    """The engine has taken a later command, of whatever kind; or it is another life."""

    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)

        async def move(order: str, instance: str = "life-1") -> int:
            headers = BEARER | {"x-headrace-order": order, "x-headrace-instance": instance}
            return (await call(fence, "POST", path, headers)).status

        await confirm(fence)
        assert [await move(order) for order in ("0.9.9", "1.0.0", "1.2.3", "1.2.2", "1.2.3")] == [
            *(409, 200, 200),
            *(409, 200),
        ]
        assert await move("2.0.0", instance="life-0") == 409
        assert [await move(order) for order in ("", "1", "1.2.x", "1.2.3.4", "-1.0.0", f"{10**99}.0.0")] == [400] * 6
        late = await call(fence, "POST", "/fence", pieces=(json.dumps({**CONFIRM, "epoch": 6}).encode(),))
        assert late.status == 409
        assert len(inner.scopes) == 3

    asyncio.run(scenario())


def test_a_stream_passes_piece_by_piece_and_is_open_until_its_end() -> None:
    async def scenario() -> None:
        inner = Streaming()
        fence = Fence(inner)
        await confirm(fence)
        exchange = Exchange()
        exchange.incoming.put_nowait({"type": "http.request", "body": b"{}"})
        scope = scope_of("POST", "/v1/completions", BEARER | GENERATING | {"x-request-id": "r-1"})
        running = asyncio.create_task(fence(scope, exchange.receive, exchange.send))
        await exchange.until_sent(2)
        assert exchange.body == b"one"
        assert json.loads((await call(fence, "GET", "/fence")).body)["open_requests"] == ["r-1"]
        inner.release.set()
        await running
        assert exchange.body == b"onetwo"
        assert json.loads((await call(fence, "GET", "/fence")).body)["open_requests"] == []

    asyncio.run(scenario())


def test_a_request_that_fails_or_is_cancelled_is_no_longer_open() -> None:
    class Failing(Inner):
        async def answer(self, scope: Scope, send: Send) -> None:
            raise RuntimeError("engine core died")

    async def scenario() -> None:
        fence = Fence(Failing())
        await confirm(fence)
        with pytest.raises(RuntimeError, match="engine core died"):
            await call(fence, "POST", "/v1/completions", BEARER | GENERATING)
        assert json.loads((await call(fence, "GET", "/fence")).body)["open_requests"] == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [("/pause", {}), ("/fence", {**CONFIRM, "epoch": 6, "step": 1}), ("/fence", {**CONFIRM, "epoch": None, "step": 1})],
)
def test_a_body_that_was_under_way_when_the_epoch_ended_is_refused(path: str, body: dict[str, Any]) -> None:
    """Its headers came in time; what it asks for would be computed under other weights."""

    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        await confirm(fence)
        exchange = Exchange()
        exchange.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        scope = scope_of("POST", "/v1/completions", BEARER | GENERATING)
        running = asyncio.create_task(fence(scope, exchange.receive, exchange.send))
        await exchange.taken.wait()
        await call(fence, "POST", path, pieces=(json.dumps(body).encode(),))
        exchange.incoming.put_nowait({"type": "http.request", "body": b"}"})
        await running
        assert exchange.status == 503
        assert "/v1/completions" not in {scope["path"] for scope in inner.scopes}

    asyncio.run(scenario())


def test_a_client_that_leaves_before_its_body_is_whole_reaches_nobody() -> None:
    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        await confirm(fence)
        exchange = Exchange()
        exchange.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        exchange.incoming.put_nowait({"type": "http.disconnect"})
        scope = scope_of("POST", "/v1/completions", BEARER | GENERATING)
        await fence(scope, exchange.receive, exchange.send)
        assert (exchange.sent, inner.scopes) == ([], [])

    asyncio.run(scenario())


def test_its_own_route() -> None:
    async def scenario() -> None:
        fence = Fence(Inner())
        at_boot = await call(fence, "GET", "/fence")
        assert json.loads(at_boot.body) == {
            "instance": "life-1",
            "epoch": None,
            "paused": False,
            "open_requests": [],
            "order": None,
            "version": None,
            "unfit": "",
            "lost": False,
            "running": "",
        }
        await confirm(fence)
        answer = json.loads((await call(fence, "GET", "/fence")).body)
        assert (answer["epoch"], answer["order"]) == (5, [1, 0, 0])
        endless = await call(fence, "POST", "/fence", pieces=[b"1" * 1000] * 9)
        assert (endless.status, json.loads(endless.body)["error"]["param"]) == (400, "body")
        assert (await call(fence, "PUT", "/fence")).status == 405

    asyncio.run(scenario())


def test_lifespan_passes() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        await Fence(Inner())({"type": "lifespan"}, exchange.receive, exchange.send)
        assert exchange.sent == [{"type": "lifespan.startup.complete"}]

    asyncio.run(scenario())


def test_token_and_bodies_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        fence = Fence(Inner())
        await confirm(fence)
        body = b'{"cache_salt": "the-salt", "prompt": "the-prompt"}'
        await call(fence, "POST", "/v1/completions", BEARER | GENERATING, (body,))
        await call(fence, "POST", "/v1/completions", BEARER, (body,))
        await call(fence, "POST", "/v1/completions", {"authorization": "Bearer wrong-one"}, (body,))

    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())
    assert "instance life-1, closed" in caplog.text
    assert not [word for word in (TOKEN, "the-salt", "the-prompt", "wrong-one") if word in caplog.text]


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), ("", "the file is empty"), (" \n", "the file is empty")]
)
def test_no_start_without_a_token(environment: Path, content: str | None, says: str) -> None:
    environment.unlink()
    if content is not None:
        environment.write_text(content)
    with pytest.raises(StartRefused, match=f"HEADRACE_TOKEN_FILE=.*{says}"):
        Fence(Inner())


def test_no_start_without_the_name_of_a_token_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_TOKEN_FILE")
    with pytest.raises(StartRefused, match="HEADRACE_TOKEN_FILE must name the file"):
        Fence(Inner())


def test_no_start_under_a_name_that_no_header_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_INSTANCE", "life\r\n1")
    with pytest.raises(StartRefused, match="HEADRACE_INSTANCE must be"):
        Fence(Inner())


def test_every_life_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_INSTANCE")

    async def instance() -> str:
        return (await call(Fence(Inner()), "GET", "/health")).headers["x-headrace-instance"]

    async def scenario() -> None:
        assert await instance() != await instance()

    asyncio.run(scenario())


def test_it_needs_only_the_standard_library() -> None:
    """An engine's interpreter may have nothing else of ours."""
    code = (
        "import sys; before = set(sys.modules); import connectors.vllm_plugin.fence;"
        "print([name for name in set(sys.modules) - before if name.partition('.')[0] not in sys.stdlib_module_names])"
    )
    root = Path(__file__).parents[4]
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.strip("[]\n").replace("'", "").split(", "))
    assert loaded == {
        "connectors",
        "connectors.vllm_plugin",
        "connectors.vllm_plugin.fence",
        "connectors.vllm_plugin.fence_rules",
        "connectors.vllm_plugin.weight_routes",
        "connectors.vllm_plugin.pool_epoch",
        "connectors.vllm_plugin.rank_calls",
        "connectors.vllm_plugin.unread",
        "connectors.vllm_plugin.weight_rules",
        "connectors.vllm_plugin.weights",
        "connectors.vllm_plugin.weights.settings",
        "connectors.vllm_plugin.weights.verdict",
    }
