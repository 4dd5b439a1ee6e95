"""What people put before stock prefill and decode engines: both legs, the handoff between them, sticky sessions, and no
word about weights. Only the label is ours: it tells `judge.py` which weights a reply should have come from."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx
from aiohttp import web

from connectors.handoff import PARAMS_FIELD, REMOTE_DECODE
from tests.e2e.harness import CALL_TIMEOUT_S
from tests.fleet.versions import FIRST_VERSION

HOST, PORT = "127.0.0.1", 9455
SSE_END = b"data: [DONE]"


class StockProxy:
    """Serves in a thread of its own."""

    url = f"http://{HOST}:{PORT}"

    def __init__(self, engines: Mapping[str, str]) -> None:
        self.versions = dict.fromkeys(engines, FIRST_VERSION)
        """Weights of each engine, kept up to date by whoever loads them."""
        self._engines = engines
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> StockProxy:
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, HOST, PORT).start()
        return runner

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        pair = self.pair(request.headers["x-session-id"])
        before = self._made_by(pair)
        async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S, trust_env=False) as http:
            first = {name: value for name, value in body.items() if name != "stream_options"}
            first |= {"max_tokens": 1, "stream": False, PARAMS_FIELD: json.loads(REMOTE_DECODE)}
            handed = await http.post(self._route(pair[0]), json=first)
            if not handed.is_success:
                return web.Response(status=handed.status_code, body=handed.content)
            second = {**body, PARAMS_FIELD: handed.json()[PARAMS_FIELD]}
            if body["stream"]:
                return await self._relay(request, http, pair, before, second)
            whole = await http.post(self._route(pair[1]), json=second)
        if not whole.is_success:
            return web.Response(status=whole.status_code, body=whole.content)
        return web.json_response({**whole.json(), "headrace": self._label(pair, before)})

    async def _relay(
        self, request: web.Request, http: httpx.AsyncClient, pair: tuple[str, str], before: list[str], body: Any
    ) -> web.StreamResponse:
        """A stream, whole, with the label before its end."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async with http.stream("POST", self._route(pair[1]), json=body) as reply:
            whole = await reply.aread()
        events, _, _ = whole.partition(SSE_END)
        label = json.dumps({"choices": [], "headrace": self._label(pair, before)}).encode()
        await response.write(b"%bdata: %b\n\n%b\n\n" % (events, label, SSE_END))
        return response

    def pair(self, session: str) -> tuple[str, str]:
        """The same for every turn of a session."""
        number = zlib.crc32(session.encode())
        prefill = [name for name in self._engines if name.startswith("prefill")]
        decode = [name for name in self._engines if name.startswith("decode")]
        return prefill[number % len(prefill)], decode[number // len(prefill) % len(decode)]

    def _route(self, name: str) -> str:
        return f"{self._engines[name]}/v1/completions"

    def _made_by(self, pair: tuple[str, str]) -> list[str]:
        return [self.versions[name] for name in pair]

    def _label(self, pair: tuple[str, str], before: list[str]) -> dict[str, Any]:
        """Of a single version where both engines had it from the first leg's start to the second leg's end."""
        versions = sorted({*before, *self._made_by(pair)})
        return {
            "prefill": pair[0],
            "decode": pair[1],
            "epochs": [0] * len(versions),
            "weight_versions": versions,
            "single_version": len(versions) == 1,
            "attempts": 1,
        }
