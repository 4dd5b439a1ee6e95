"""Questions to running engines over HTTP: to one that keeps its KV, one that loses it, and ones that talk nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from connectors.engine_client import EXTERNAL_HITS, CacheConfig, CommandOrder, EngineCallFailed, EngineClient
from connectors.vllm_plugin.fence import Fence
from orchestrator.observe.engines import RunningEngines
from orchestrator.observe.outside import let_handoffs_end
from orchestrator.plan.types import EnginePlan
from tests.unit.connectors.vllm_plugin.asgi import PLAIN_ENGINE

FIRST = CommandOrder(update=0, attempt=0, step=0)
METRICS = 'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0"} 1.0\n'


@dataclass
class SmallEngine:
    """An ASGI app with the few routes; its pool gives back whole blocks of prompts that it has seen."""

    keeps: bool = True
    metrics: str = METRICS
    refusals: int = 2
    """How often a reset is refused, as while a save is under way."""
    replies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Given instead, by path."""
    hits: int = 0
    local: set[tuple[int, ...]] = field(default_factory=set)
    pool: set[tuple[int, ...]] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body = (await receive()).get("body", b"")
        status, answer = self.replies.get(scope["path"]) or self._answer(scope["path"], body)
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(answer))]}
        )
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/metrics":
            return 200, f"{self.metrics}{EXTERNAL_HITS}_total {self.hits}\n".encode()
        if path == "/reset_prefix_cache":
            self.refusals -= 1
            if self.refusals < 0:
                self.local.clear()
            return 200, json.dumps({"success": self.refusals < 0}).encode()
        return 200, json.dumps(self._complete(json.loads(body))).encode()

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        prompt = tuple(body["prompt"])
        cached = 0
        if prompt not in self.local and prompt in self.pool:
            cached = (len(prompt) - 1) // 32 * 32
            self.hits += cached
        self.local.add(prompt)
        if self.keeps:
            self.pool.add(prompt)
        return {"usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine()


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(path))
    monkeypatch.setenv("HEADRACE_INSTANCE", "life-1")
    return path


def engine_plan(name: str, url: str, token_file: Path) -> EnginePlan:
    return EnginePlan(
        name=name,
        role="prefill",
        node="n",
        url=url,
        gpus=(),
        ranks=1,
        cores=(),
        joins_pool=True,
        token_file=str(token_file),
    )


@pytest.fixture
def fenced(engine: SmallEngine, serve: Callable[[Any], httpx.Client], token_file: Path) -> EnginePlan:
    """The engine behind its fence, as it boots."""
    fence = Fence(engine)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=PLAIN_ENGINE))

    async def as_of_vllm(scope: Any, receive: Any, send: Any) -> None:
        await fence({**scope, "app": app}, receive, send)

    return engine_plan("prefill-0", str(serve(as_of_vllm).base_url), token_file)


@pytest.fixture
def plan(fenced: EnginePlan) -> EnginePlan:
    """The engine once its epoch is confirmed."""
    with EngineClient(fenced.url, fenced.token_file) as client:
        client.confirm_epoch("life-1", 1, FIRST)
    return fenced


@pytest.mark.parametrize("reply", [(404, b"no such route"), (200, b"{}"), (200, b"[]"), (200, b"<html>")])
def test_an_engine_without_a_fence_is_not_probed(
    engine: SmallEngine, serve: Callable[[Any], httpx.Client], token_file: Path, reply: tuple[int, bytes]
) -> None:
    engine.replies = {"/fence": reply}
    bare = engine_plan("prefill-0", str(serve(engine).base_url), token_file)
    assert "/fence" in RunningEngines().probe_offload(bare, "small", "salt").problem
    assert engine.bodies == []


def test_a_token_that_cannot_be_read(fenced: EnginePlan, token_file: Path) -> None:
    token_file.unlink()
    assert RunningEngines().cache_configs([fenced]) == {}
    assert "cannot be read" in RunningEngines().probe_offload(fenced, "small", "salt").problem


def test_a41_a_probe_leaves_the_fence_as_it_was(engine: SmallEngine, fenced: EnginePlan) -> None:
    """Also the second time, when the engine has been given commands before."""
    for _ in range(2):
        assert RunningEngines().probe_offload(fenced, "small", "salt").external_hit_tokens == 64
        with EngineClient(fenced.url, fenced.token_file) as client:
            assert client.fence().epoch is None
        engine.local.clear()
        engine.pool.clear()


def test_a_probe_that_fails_leaves_the_fence_closed(engine: SmallEngine, fenced: EnginePlan) -> None:
    engine.replies = {"/v1/completions": (500, b"no")}
    assert "answered 500" in RunningEngines().probe_offload(fenced, "small", "salt").problem
    with EngineClient(fenced.url, fenced.token_file) as client:
        assert client.fence().epoch is None


def test_a21_a_pool_that_answers(engine: SmallEngine, plan: EnginePlan) -> None:
    probe = RunningEngines().probe_offload(plan, "small", "salt")
    assert (probe.engine, probe.prompt_tokens, probe.external_hit_tokens, probe.problem) == ("prefill-0", 66, 64, "")
    assert [body["cache_salt"] for body in engine.bodies] == ["1.salt", "1.salt"]
    assert engine.bodies[0] == engine.bodies[1]


def test_a21_a_pool_that_keeps_nothing(engine: SmallEngine, plan: EnginePlan) -> None:
    engine.keeps = False
    assert RunningEngines().probe_offload(plan, "small", "salt").external_hit_tokens == 0


@pytest.mark.parametrize(
    ("path", "status", "body", "says"),
    [
        ("/v1/completions", 500, b"no", "answered 500: no"),
        ("/v1/completions", 200, b"[1]", "no completion: [1]"),
        ("/v1/completions", 200, b"<html>", "no completion: <html>"),
        ("/metrics", 404, b"", "GET {url}/metrics answered 404"),
        ("/metrics", 200, b"{not prometheus", "no Prometheus text"),
        ("/metrics", 200, b"up 1\n", "no vllm:cache_config_info"),
        ("/metrics", 200, b'vllm:cache_config_info{block_size="None",cache_dtype="auto"} 1\n', "no usable"),
        ("/metrics", 200, b'vllm:cache_config_info{cache_dtype="auto"} 1\n', "no usable 'block_size'"),
        ("/reset_prefix_cache", 404, b"", "/reset_prefix_cache answered 404"),
    ],
)
def test_a_probe_that_cannot_be_made_says_why(
    engine: SmallEngine, plan: EnginePlan, path: str, status: int, body: bytes, says: str
) -> None:
    engine.replies = {path: (status, body)}
    assert says.format(url=plan.url) in RunningEngines().probe_offload(plan, "small", "salt").problem


def test_cache_configs_leave_out_who_does_not_report(plan: EnginePlan) -> None:
    silent = engine_plan("decode-0", "http://127.0.0.1:9", Path(plan.token_file))
    reported = RunningEngines().cache_configs([silent, plan])
    assert reported == {"prefill-0": CacheConfig(block_size=32, cache_dtype="auto")}


@pytest.mark.parametrize(
    ("body", "done"), [(b'{"success": true}', True), (b'{"success": false}', False), (b"", None), (b"[]", None)]
)
def test_answers_to_a_reset(engine: SmallEngine, plan: EnginePlan, body: bytes, done: bool) -> None:
    engine.replies = {"/reset_prefix_cache": (200, body)}
    with EngineClient(plan.url, plan.token_file) as client:
        assert client.reset_local_cache() is done


def test_an_engine_that_is_not_there(token_file: Path) -> None:
    with (
        EngineClient("http://127.0.0.1:9", str(token_file)) as client,
        pytest.raises(EngineCallFailed, match=r"GET http.*/metrics: \S"),
    ):
        client.cache_config()


def test_a_prefill_engine_that_is_to_be_restarted_is_paused_until_its_handoffs_are_read(
    engine: SmallEngine, plan: EnginePlan
) -> None:
    engine.replies["/pause"] = (200, b"{}")
    let_handoffs_end(plan, 5.0)
    with EngineClient(plan.url, plan.token_file) as client:
        order = client.fence().order
    assert order is not None
    assert order.step == FIRST.step + 1, "it follows what the engine was told last"
    # One that does not do it is restarted all the same.
    engine.replies["/pause"] = (500, b"no")
    let_handoffs_end(plan, 5.0)
