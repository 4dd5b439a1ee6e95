"""A stream that has begun when new weights come: its leg is ended, and it goes on under the next epoch where it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.core.split import ROUTE_OF_PATH
from router.main import RunningRouter, running
from router.settings import EngineEndpoint
from tests.integration.router.harness import TOKEN, make_settings, until
from tests.unit.router.model_engine import PROMPT, ModelEngine

PIECES = [b"one ", b"two ", b"three ", b"four ", b"five ", b"six ", b"seven ", b"eight"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "say: ", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say: "}], "max_completion_tokens": 8},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8}, "output_mode": "text"},
}


@dataclass
class Engine:
    """Hands over, or streams the model's events, and stops after `holds_at` of them in its first run."""

    route: str
    holds_at: int | None = None
    salts: list[str] = field(default_factory=list)
    left: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.model = ModelEngine(route=ROUTE_OF_PATH[self.route], pieces=PIECES)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.salts.append(body["cache_salt"])
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return web.json_response({"choices": [], "kv_transfer_params": {"do_remote_prefill": True}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(self.model.stream(body)):
            if number == self.holds_at and len(self.model.requests) == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.left += 1
                    raise
            await response.write(event)
        return response


@dataclass
class Setting:
    router: RunningRouter
    prefill: Engine
    decode: Engine
    client: aiohttp.ClientSession

    async def command(self, path: str, body: dict[str, Any]) -> None:
        url = f"http://127.0.0.1:{self.router.internal_port}{path}"
        async with self.client.post(url, json=body, headers={"Authorization": f"Bearer {TOKEN}"}) as reply:
            assert reply.status == 200, await reply.text()

    async def update(self, how: str) -> None:
        """What a coordinator does around new weights."""
        await self.command("/gate", {"gate": "holding", "update": 1})
        await self.command("/in_flight", {"mode": how, "update": 1})
        await self.command("/gate", {"gate": "frozen", "update": 1})
        await self.command("/epochs", {"epoch": 2, "version": "v2", "update": 1})
        await self.command("/gate", {"gate": "open", "update": 1})


@asynccontextmanager
async def setting(route: str, holds_at: int, **settings: Any) -> AsyncIterator[Setting]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(Engine(route).running())
        decode = await stack.enter_async_context(Engine(route, holds_at).running())
        engines = [
            EngineEndpoint(name="prefill-0", role="prefill", url=prefill.url),
            EngineEndpoint(name="decode-0", role="decode", url=decode.url),
        ]
        router = await stack.enter_async_context(running(make_settings(engines, **settings), TOKEN))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        made = Setting(router, prefill, decode, client)
        await made.command("/epochs", {"epoch": 1, "version": "v1"})
        await until(lambda: all(view.usable for view in router.dispatcher.fleet.views()))
        await made.command("/gate", {"gate": "open"})
        yield made


async def _stream_through_an_update(made: Setting, path: str, how: str, holds_at: int, **fields: Any) -> list[Any]:
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}} | fields
    url = f"http://127.0.0.1:{made.router.port}{path}"
    async with made.client.post(url, json=body) as reply:
        assert reply.status == 200
        raw = b""
        while raw.count(b"data:") < holds_at:
            raw += await reply.content.readany()
        await made.update(how)
        raw += await reply.content.read()
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def _text(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events if event != b"[DONE]" and event.get("choices")]
    return "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("holds_at", [1, 4])
def test_a_stream_goes_on_under_the_next_weights(path: str, holds_at: int) -> None:
    async def case() -> None:
        async with setting(path, holds_at, readmit_streams=True) as made:
            events = await _stream_through_an_update(made, path, "readmit", holds_at, return_headrace=True)
            assert _text(events) == b"".join(PIECES).decode()
            assert events[-1] == b"[DONE]"
            labels = [event["headrace"] for event in events[:-1] if "headrace" in event]
            assert [(each["epochs"], each["single_version"]) for each in labels] == [([1, 2], False)]
            usage = [event["usage"] for event in events[:-1] if event.get("usage")][-1]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), len(PIECES))
            assert made.decode.left == 1
            assert len(set(made.decode.salts)) == 2
            assert len(set(made.prefill.salts)) == 2
            views = made.router.dispatcher.fleet.views()
            assert all(view.legs_in_flight == view.active_sessions == 0 for view in views)

    asyncio.run(case())


def test_without_the_setting_a_stream_ends_with_an_error_event() -> None:
    async def case() -> None:
        async with setting("/v1/completions", 3) as made:
            events = await _stream_through_an_update(made, "/v1/completions", "readmit", 3)
            assert events[-1]["error"]["code"] == 503
            assert "send the request again" in events[-1]["error"]["message"]
            assert len(made.decode.model.requests) == 1

    asyncio.run(case())


def test_a_stream_that_cannot_go_on_says_why() -> None:
    async def case() -> None:
        async with setting("/v1/completions", 3, readmit_streams=True) as made:
            events = await _stream_through_an_update(made, "/v1/completions", "readmit", 3, presence_penalty=0.5)
            assert "presence_penalty" in events[-1]["error"]["message"]

    asyncio.run(case())
