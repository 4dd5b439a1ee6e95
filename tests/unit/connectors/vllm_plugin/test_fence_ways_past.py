"""The fence and what could get past it: routes that throw weights away, connections that outlive their epoch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from connectors.vllm_plugin.fence import Fence, Receive, Scope, Send
from tests.unit.connectors.vllm_plugin.asgi import BEARER, TOKEN, Exchange, Inner, call, scope_of

GENERATING = {"x-headrace-instance": "life-1", "x-headrace-epoch": "5", "x-headrace-salted": "1"}


async def confirm(fence: Fence, epoch: int = 5) -> None:
    command = {"instance": "life-1", "epoch": epoch, "update": epoch, "attempt": 0, "step": 1}
    assert (await call(fence, "POST", "/fence", pieces=(json.dumps(command).encode(),))).status == 200


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("HEADRACE_INSTANCE", "life-1")


@pytest.mark.parametrize(
    ("path", "query", "body", "status"),
    [
        ("/weight_checker", b"", b'{"action": "checksum"}', 200),
        ("/weight_checker", b"", b'{"action": "compare", "baseline": {}}', 200),
        ("/weight_checker", b"", b'{"action": "reset"}', 403),
        ("/weight_checker", b"", b'{"action": "compare", "action": "reset"}', 403),
        ("/weight_checker", b"", b"[" * 100_000, 403),
        ("/sleep", b"", b"", 200),
        ("/sleep", b"level=1&mode=keep", b"", 200),
        ("/sleep", b"level=2", b"", 403),
        ("/sleep", b"level=1&level=2", b"", 403),
        ("/sleep", b"level=%32", b"", 403),
    ],
)
def test_nothing_throws_weights_away_under_a_confirmed_epoch(path: str, query: bytes, body: bytes, status: int) -> None:
    async def scenario() -> None:
        inner = Inner()
        fence = Fence(inner)
        await confirm(fence)
        assert (await call(fence, "POST", path, pieces=(body,), query_string=query)).status == status
        assert inner.bodies == ([body] if status == 200 else [])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        (GENERATING, "websocket.close"),
        (BEARER, "websocket.close"),
        (BEARER | GENERATING, "websocket.accept"),
    ],
)
def test_websockets(headers: dict[str, str], answer: str) -> None:
    async def scenario() -> None:
        fence = Fence(Inner())
        await confirm(fence)
        exchange = Exchange()
        scope = {**scope_of("GET", "/v1/realtime", headers), "type": "websocket"}
        await fence(scope, exchange.receive, exchange.send)
        assert [message["type"] for message in exchange.sent] == [answer]

    asyncio.run(scenario())


class Conversing(Inner):
    """Notes what comes over a websocket until its end."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await super().__call__(scope, receive, send)
            return
        while (message := await receive())["type"] != "websocket.disconnect":
            self.heard.append(message["text"])
            self.entered.set()


def test_a_websocket_asks_for_nothing_under_other_weights_than_it_named() -> None:
    async def scenario() -> None:
        inner, exchange = Conversing(), Exchange()
        fence = Fence(inner)
        await confirm(fence)
        scope = {**scope_of("GET", "/v1/realtime", BEARER | GENERATING), "type": "websocket"}
        running = asyncio.create_task(fence(scope, exchange.receive, exchange.send))
        exchange.incoming.put_nowait({"type": "websocket.receive", "text": "before"})
        await inner.entered.wait()
        await confirm(fence, 6)
        exchange.incoming.put_nowait({"type": "websocket.receive", "text": "after"})
        await running
        assert inner.heard == ["before"]

    asyncio.run(scenario())
