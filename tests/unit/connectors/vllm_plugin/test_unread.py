"""Pauses that give up handoffs which nobody is going to read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.vllm_plugin import unread
from connectors.vllm_plugin.fence import Fence
from connectors.vllm_plugin.weights.settings import WORKER_EXTENSION
from tests.unit.connectors.vllm_plugin.asgi import BEARER, TOKEN, Inner, call


class Engine:
    """An engine client of two ranks, and a pause that ends once all handoffs are gone."""

    def __init__(self, *, handoffs: int, fails: str = "", extension: str = WORKER_EXTENSION) -> None:
        parallel = SimpleNamespace(worker_extension_cls=extension, world_size=2)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.handoffs, self.fails, self.calls = handoffs, fails, 0
        self.quiet = asyncio.Event()
        self.give_up(0)

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        assert method == "headrace_drop_handoffs"
        self.calls += 1
        if not self.fails:
            self.give_up(1)
        report = {"call": args[0], "ok": not self.fails, "error": self.fails, "ranks": 2, "version": None, "torn": ""}
        return [{**report, "rank": rank} for rank in range(2)]

    def give_up(self, handoffs: int) -> None:
        self.handoffs -= handoffs
        if self.handoffs <= 0:
            self.quiet.set()

    async def pause(self) -> None:
        await self.quiet.wait()


def always() -> bool:
    return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "DROP_EVERY_S", 0.005)


def test_handoffs_are_dropped_until_the_pause_is_over() -> None:
    """The last ones are told to the ranks after the pause has come."""
    engine = Engine(handoffs=3)
    asyncio.run(unread.drop_while(engine, engine.pause(), is_wanted=always))
    assert engine.calls == 3


def test_a_pause_that_waits_for_nothing_asks_nobody() -> None:
    engine = Engine(handoffs=0)
    asyncio.run(unread.drop_while(engine, engine.pause(), is_wanted=always))
    assert engine.calls == 0


@pytest.mark.parametrize("more", [{"fails": "AttributeError: no leases"}, {"extension": ""}])
def test_where_ranks_cannot_drop_them_the_pause_waits(more: dict[str, str]) -> None:
    async def scenario() -> int:
        engine = Engine(handoffs=2, **more)
        pausing = asyncio.create_task(unread.drop_while(engine, engine.pause(), is_wanted=always))
        await asyncio.sleep(0.05)
        assert not pausing.done()
        engine.give_up(2)
        await pausing
        return engine.calls

    assert asyncio.run(scenario()) == (1 if "fails" in more else 0)


def test_a_client_that_leaves_takes_the_pause_along() -> None:
    async def scenario() -> None:
        engine = Engine(handoffs=1, extension="")
        pause = asyncio.ensure_future(engine.pause())
        pausing = asyncio.create_task(unread.drop_while(engine, pause, is_wanted=always))
        await asyncio.sleep(0.01)
        pausing.cancel()
        await asyncio.wait({pausing, pause})
        assert pause.cancelled()

    asyncio.run(scenario())


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(tmp_path / "token"))


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(("header", "calls"), [("drop", 1), ("keep", 0), (None, 0)])
def test_the_fence_drops_them_where_its_pause_says_so(header: str | None, calls: int) -> None:
    engine = Engine(handoffs=1)

    class Paused(Inner):
        async def answer(self, scope: Any, send: Any) -> None:
            if header == "drop":
                await engine.pause()
            await super().answer(scope, send)

    headers = BEARER if header is None else {**BEARER, "x-headrace-handoffs": header}
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    reply = asyncio.run(call(Fence(Paused()), "POST", "/pause", headers, app=app))
    assert (reply.status, engine.calls) == (200, calls)


@pytest.mark.usefixtures("token")
def test_a_resume_ends_it_though_the_pause_itself_goes_on_waiting() -> None:
    """vLLM ends a pause when the engine is idle next. Under the traffic after a resume that can take long, and each of
    those handoffs has a reader."""

    class Pausing(Inner):
        async def answer(self, scope: Any, send: Any) -> None:
            if scope["path"] == "/pause":
                await engine.pause()
            await super().answer(scope, send)

    async def scenario() -> None:
        app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        fence = Fence(Pausing())
        pausing = asyncio.create_task(call(fence, "POST", "/pause", {**BEARER, "x-headrace-handoffs": "drop"}, app=app))
        while not engine.calls:
            await asyncio.sleep(0)
        assert (await call(fence, "POST", "/resume", app=app)).status == 200
        before = engine.calls
        await asyncio.sleep(0.05)
        assert (engine.calls, pausing.done()) == (before, False)
        engine.quiet.set()
        assert (await pausing).status == 200

    engine = Engine(handoffs=1_000_000)
    asyncio.run(scenario())
