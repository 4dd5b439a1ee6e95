"""A small engine over real HTTP that misbehaves on request.

Its knobs are attributes, its memory is `requests`. It honours the caps of a request, returns a handoff
when asked for a remote decode, and "computes" the prompt only if no handoff came with it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Recorded:
    """One generating request as the engine saw it."""

    path: str
    body: dict[str, Any]
    raw: bytes
    request_id: str
    at: float
    generated: int = 0
    computed_prompt_tokens: int = 0


@dataclass
class StubEngine:
    """Knobs first, then what it remembers."""

    name: str
    latency_s: float = 0.0
    """Before the reply's headers."""
    first_token_s: float = 0.0
    """Between the headers and the first token of a stream."""
    token_s: float = 0.0
    tokens: list[str] = field(default_factory=lambda: ["a", "b", "c", "d"])
    status: int = 200
    error_body: bytes | None = None
    fail_first: int = 0
    """So many requests get `status`, the others 200; 0: all."""
    silent: bool = False
    """Take requests and never answer."""
    drop: bool = False
    """Close the connection without a reply."""
    break_after: int | None = None
    """Close a stream after so many tokens."""
    stream_error: bool = False
    """Answer a stream with 200 and an error event."""
    finish_reason: str = "length"
    prompt_tokens: int = 6
    cached_tokens: int | None = None
    handoff: dict[str, Any] | None = None
    """What to hand over; None: nothing is handed over."""
    dies_on: str | None = None
    """A field whose sight kills the engine."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of each reply and chunk."""
    choice_extra: dict[str, Any] = field(default_factory=dict)
    healthy: bool = True
    health_s: float = 0.0

    requests: list[Recorded] = field(default_factory=list)
    open: int = 0
    closed_early: int = 0
    """Requests whose client left before the end."""
    sent_at: list[float] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubEngine]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def _health(self, _request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_s)
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        record = Recorded(
            path=request.path,
            body=body,
            raw=raw,
            request_id=request.headers.get("X-Request-Id", ""),
            at=time.monotonic(),
        )
        self.requests.append(record)
        self.open += 1
        try:
            return await self._reply(request, record)
        except (asyncio.CancelledError, ConnectionResetError):
            self.closed_early += 1
            raise
        finally:
            self.open -= 1

    async def _reply(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        if self.dies_on is not None and self.dies_on in record.body:
            self.drop, self.healthy = True, False
        if self.silent:
            await asyncio.Event().wait()
        if self.drop:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        await asyncio.sleep(self.latency_s)
        if self.status != 200 and (not self.fail_first or len(self.requests) <= self.fail_first):
            default = json.dumps({"error": {"message": f"{self.name} says no", "code": self.status}}).encode()
            return web.Response(
                status=self.status, body=self.error_body or default, headers={"Content-Type": "application/json"}
            )
        tokens = self._generated(record)
        if record.body.get("stream"):
            return await self._stream(request, record, tokens)
        await asyncio.sleep(self.token_s * len(tokens))
        return web.json_response(self._whole(record, tokens))

    def _generated(self, record: Recorded) -> list[str]:
        caps = [record.body[key] for key in ("max_tokens", "max_completion_tokens") if record.body.get(key)]
        tokens = self.tokens[: min(caps)] if caps else self.tokens
        record.generated = len(tokens)
        transfer = record.body.get("kv_transfer_params") or {}
        record.computed_prompt_tokens = 0 if transfer.get("do_remote_prefill") else self.prompt_tokens
        return tokens

    def _usage(self, tokens: list[str]) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(tokens)}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens, "other": 1}
        return usage

    def _whole(self, record: Recorded, tokens: list[str]) -> dict[str, Any]:
        chat = record.path.endswith("/chat/completions")
        text = "".join(tokens)
        choice = {"index": 0, "finish_reason": self.finish_reason, **self.choice_extra}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        reply = {"id": record.request_id, "served_by": self.name, "choices": [choice], "usage": self._usage(tokens)}
        if record.body.get("prompt_logprobs") is not None:
            logprobs = [None, *({str(at): {"logprob": -float(at)}} for at in range(1, self.prompt_tokens))]
            (reply if chat else choice)["prompt_logprobs"] = logprobs
        if self.handoff is not None and (record.body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            reply["kv_transfer_params"] = {**self.handoff, "remote_request_id": record.request_id}
        return reply | self.extra

    async def _stream(self, request: web.Request, record: Recorded, tokens: list[str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await asyncio.sleep(self.first_token_s)
        if self.stream_error:
            await response.write(b'data: {"error": {"message": "load failed", "code": 500}}\n\ndata: [DONE]\n\n')
            return response
        for number, token in enumerate(tokens):
            if number == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            chunk = {
                "id": record.request_id,
                "choices": [{"index": 0, "text": token, **self.choice_extra}],
                **self.extra,
            }
            self.sent_at.append(time.monotonic())
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(self.token_s)
        if (record.body.get("stream_options") or {}).get("include_usage"):
            last = {"id": record.request_id, "choices": [], "usage": self._usage(tokens)}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-7",
    "remote_block_ids": [[1, 2, 3], [7]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 6,
    "remote_blocks_expiry_time": None,
    "invented": {"nested": [True, None, 1.50]},
}
"""A handoff as a prefill engine gives it, with one key that nobody knows; the engine adds `remote_request_id`."""
