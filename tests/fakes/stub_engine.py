"""A small engine over real HTTP that misbehaves on request.

Its knobs are attributes, its memory is `requests`. It honours the caps of a request, returns a handoff
when asked for a remote decode, and "computes" the prompt only if no handoff came with it. With a `fence` it refuses
what the real plug-in would refuse: the rules are the plug-in's own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from aiohttp import web
from aiohttp.typedefs import Handler

from connectors.vllm_plugin.fence_rules import Answer, FenceState, error_answer

GENERATE = "/inference/v1/generate"


@dataclass
class Recorded:
    """One generating request as the engine saw it."""

    path: str
    body: dict[str, Any]
    raw: bytes
    request_id: str
    headers: dict[str, str]
    """Names in lower case."""
    at: float
    generated: int = 0
    computed_prompt_tokens: int = 0

    @property
    def sampling(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("sampling_params", {}) if self.path == GENERATE else self.body
        return found

    @property
    def handoff(self) -> dict[str, Any]:
        """What came with a decode leg, or asks a prefill leg for one."""
        return self.body.get("kv_transfer_params") or {}


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class StubEngine:
    """Knobs first, then what it remembers."""

    name: str
    fence: FenceState | None = None
    """None: an engine without one."""
    token: str = ""
    """What the fence asks for."""
    accepts: asyncio.Event = field(default_factory=_set_event)
    """Clear: requests that have arrived are not accepted yet (the fence does not list them)."""
    answers: asyncio.Event = field(default_factory=_set_event)
    """Clear: accepted requests wait for their answer."""
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
    """Take requests and never answer; probes are answered."""
    lives: asyncio.Event = field(default_factory=_set_event)
    """Clear: it hangs. Its connections stay open and nothing comes over them, not even answers to probes."""
    drop: bool = False
    """Close the connection without a reply."""
    drop_reused: bool = False
    """Do so to a request that comes on a connection that has served one before."""
    raw: bytes | None = None
    """The whole of each reply's body, with 200."""
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
    keepalive_s: float = 75.0
    """Idle connections are closed after this; read at the start."""

    arrived: int = 0
    """Generating requests, accepted or not."""
    requests: list[Recorded] = field(default_factory=list)
    refused: list[Recorded] = field(default_factory=list)
    """Generating requests that the fence did not let in."""
    asked: list[Recorded] = field(default_factory=list)
    """Requests that generate nothing, probes aside."""
    open: int = 0
    closed_at: list[float] = field(default_factory=list)
    """When a request's client left before the end."""
    closed_in_pause: int = 0
    """Those of them whose client left between pause and resume: a real engine can die of it."""
    reused: int = 0
    """Generating requests that came on a connection that had served one before."""
    sent_at: list[float] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None
    _used: WeakSet[asyncio.BaseTransport] = field(default_factory=WeakSet)
    """Connections that have served a generating request."""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def closed_early(self) -> int:
        return len(self.closed_at)

    @property
    def connections(self) -> int:
        assert self._runner is not None
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=256 * 1024 * 1024, middlewares=[self._guard])
        app.on_response_prepare.append(self._label)
        self.add_routes(app)
        app.router.add_get("/health", self._health)
        app.router.add_get("/fence", self._fence_view)
        app.router.add_get("/v1/models", self._models)
        for path in ("/tokenize", "/detokenize"):
            app.router.add_post(path, self._echo)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=self.keepalive_s,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def add_routes(self, app: web.Application) -> None:
        """Further ones, of subclasses."""

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, instance: str) -> None:
        """Another life behind the same port: fenced, until someone confirms an epoch."""
        await self.stop()
        self.fence = FenceState(instance=instance)
        await self.start(self.port)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubEngine]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    # -- the fence -----------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await self.lives.wait()
        if self.fence is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _respond(error_answer(401, "authentication_error", "this engine needs the job's bearer token"))
        return await handler(request)

    async def _label(self, _request: web.Request, response: web.StreamResponse) -> None:
        if self.fence is not None:
            response.headers.update({name.decode(): value.decode() for name, value in self.fence.labels()})

    async def _fence_view(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(self.fence.view()) if self.fence is not None else web.Response(status=404)

    def _refusal(self, record: Recorded) -> Answer | None:
        if self.fence is None:
            return None
        return self.fence.refusal({name.encode(): value.encode() for name, value in record.headers.items()})

    # -- routes --------------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_s)
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self.asked.append(await _record(request, {}))
        names = ("stub", "stub-latest")
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def _echo(self, request: web.Request) -> web.Response:
        record = await _record(request)
        self.asked.append(record)
        return web.json_response({"served_by": self.name, "asked": record.body})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        record = await _record(request)
        self.arrived += 1
        await self.accepts.wait()
        if (refusal := self._refusal(record)) is not None:
            self.refused.append(record)
            return _respond(refusal)
        number = self.fence.accept(record.request_id) if self.fence is not None else 0
        self.requests.append(record)
        self.open += 1
        try:
            return await self._reply(request, record)
        except (asyncio.CancelledError, ConnectionResetError):
            self.closed_at.append(time.monotonic())
            self.closed_in_pause += self.fence is not None and self.fence.paused
            raise
        finally:
            self.open -= 1
            if number and self.fence is not None:
                self.fence.open_requests.pop(number, None)

    async def _reply(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        if self.dies_on in record.body or self.dies_on in record.sampling:
            self.drop, self.healthy = True, False
        if self.silent:
            await asyncio.Event().wait()
        if self.drop or (self._is_reused(request) and self.drop_reused):
            _abort(request)
        await self.answers.wait()
        await asyncio.sleep(self.latency_s)
        await self.lives.wait()
        if self.status != 200 and (not self.fail_first or len(self.requests) <= self.fail_first):
            default = json.dumps({"error": {"message": f"{self.name} says no", "code": self.status}}).encode()
            return web.Response(
                status=self.status, body=self.error_body or default, headers={"Content-Type": "application/json"}
            )
        if self.raw is not None:
            return web.Response(body=self.raw, headers={"Content-Type": "application/json"})
        tokens = self._generated(record)
        if record.body.get("stream"):
            return await self._stream(request, record, tokens)
        await asyncio.sleep(self.token_s * len(tokens))
        return web.json_response(self._whole(record, tokens))

    def _is_reused(self, request: web.Request) -> bool:
        assert request.transport is not None
        reused = request.transport in self._used
        self._used.add(request.transport)
        self.reused += reused
        return reused

    # -- what comes out ------------------------------------------------------------------------------------

    def _generated(self, record: Recorded) -> list[str]:
        caps = [record.sampling[key] for key in ("max_tokens", "max_completion_tokens") if record.sampling.get(key)]
        tokens = self.tokens[: min(caps)] if caps else self.tokens
        record.generated = len(tokens)
        record.computed_prompt_tokens = 0 if record.handoff.get("do_remote_prefill") else self.prompt_tokens
        return tokens

    def _usage(self, tokens: list[str]) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(tokens)}
        usage["total_tokens"] = self.prompt_tokens + len(tokens)
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens, "other": 1}
        return usage

    def _choice(self, record: Recorded, text: str, *, delta: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, **self.choice_extra}
        if record.path == GENERATE:
            return choice | {"token_ids": [*text.encode()]}
        if record.path.endswith("/chat/completions"):
            return choice | {"delta" if delta else "message": {"role": "assistant", "content": text}}
        return choice | {"text": text}

    def _whole(self, record: Recorded, tokens: list[str]) -> dict[str, Any]:
        in_choice = record.path.endswith("/v1/completions")
        choice = self._choice(record, "".join(tokens)) | {"finish_reason": self.finish_reason}
        if record.sampling.get("seed") is not None:
            choice["seed"] = record.sampling["seed"]
        reply: dict[str, Any] = {
            "id": record.request_id,
            "served_by": self.name,
            "choices": [choice],
            "usage": self._usage(tokens),
        }
        if record.sampling.get("prompt_logprobs") is not None:
            logprobs: list[Any] = [None, *({str(at): {"logprob": -float(at)}} for at in range(1, self.prompt_tokens))]
            (choice if in_choice else reply)["prompt_logprobs"] = logprobs
        if self.handoff is not None and record.handoff.get("do_remote_decode"):
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
                _abort(request)
            chunk = {
                "id": record.request_id,
                "choices": [self._choice(record, token, delta=True)],
                **self.extra,
            }
            await self.lives.wait()
            self.sent_at.append(time.monotonic())
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(self.token_s)
        if (record.body.get("stream_options") or {}).get("include_usage"):
            last = {"id": record.request_id, "choices": [], "usage": self._usage(tokens)}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def _record(request: web.Request, body: dict[str, Any] | None = None) -> Recorded:
    raw = await request.read()
    return Recorded(
        path=request.path,
        body=json.loads(raw) if body is None else body,
        raw=raw,
        request_id=request.headers.get("X-Request-Id", ""),
        headers={name.lower(): value for name, value in request.headers.items()},
        at=time.monotonic(),
    )


def _abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


def _respond(answer: Answer) -> web.Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return web.json_response(answer.content, status=answer.status, headers=headers)


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
