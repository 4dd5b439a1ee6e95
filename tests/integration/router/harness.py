"""A router and its stub engines on loopback ports, all real HTTP, in one event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from connectors.vllm_plugin.fence_rules import FenceState
from router.core.dispatcher import Dispatcher
from router.main import RunningRouter, running
from router.settings import EngineEndpoint, RouterSettings
from tests.fakes.stub_engine import GENERATE, HANDOFF, StubEngine

TOKEN = "the-token"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

PROMPTS: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    GENERATE: {"token_ids": [1, 2, 3], "sampling_params": {}},
}
"""The least that each generating route takes."""


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        data = [line[6:] for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(each) for each in data if each != b"[DONE]"]

    @property
    def prefill(self) -> str:
        return self.headers["x-headrace-prefill"]

    @property
    def decode(self) -> str:
        return self.headers["x-headrace-decode"]

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class Bench:
    router: RunningRouter
    prefill: list[StubEngine]
    decode: list[StubEngine]
    colocated: list[StubEngine]
    client: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.router.internal_port}"

    @property
    def dispatcher(self) -> Dispatcher:
        return self.router.dispatcher

    @property
    def engines(self) -> list[StubEngine]:
        return [*self.prefill, *self.decode, *self.colocated]

    def is_usable(self, name: str) -> bool:
        return self.dispatcher.fleet.members[name].usable

    async def post(
        self,
        path: str = COMPLETIONS,
        body: Any = None,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        sent = body if isinstance(body, bytes) else json.dumps(body or {**PROMPTS[path], **fields}).encode()
        named = {"x-session-id": session} if session is not None else {}
        async with self.client.post(self.url + path, data=sent, headers={**named, **(headers or {})}) as reply:
            return Answer(reply.status, reply.headers, await reply.read())

    def start(self, path: str = COMPLETIONS, **arguments: Any) -> asyncio.Task[Answer]:
        """The same, not awaited."""
        return asyncio.create_task(self.post(path, **arguments))

    async def get(self, path: str, method: str = "GET") -> Answer:
        async with self.client.request(method, self.url + path) as reply:
            return Answer(reply.status, reply.headers, await reply.read())

    async def finish(self, session: str) -> Answer:
        return await self.post("/finish_session", {"session_id": session})

    async def command(self, path: str, body: Any = None, method: str = "POST") -> Answer:
        """One command on the internal port."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.client.request(method, self.admin_url + path, json=body, headers=headers) as reply:
            return Answer(reply.status, reply.headers, await reply.read())

    async def set_gate(self, state: str) -> None:
        assert (await self.command("/gate", {"gate": state})).status == 200

    async def commit(self, epoch: int, version: str, *engines: StubEngine) -> None:
        """These engines (all, where none is named) hold the weights of an epoch, and their fences know."""
        for each in engines or self.engines:
            if each.fence is not None:
                each.fence.epoch = epoch
        replicas = [{"name": each.name} for each in engines or self.engines]
        answer = await self.command("/epochs", {"epoch": epoch, "version": version, "replicas": replicas})
        assert answer.status == 200, answer.raw

    async def state(self) -> Any:
        return (await self.command("/state", method="GET")).json

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        text = (await self.get("/metrics")).raw.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        full = "headrace_router_" + name
        return sum(each.value for each in samples if each.name == full and labels.items() <= each.labels.items())

    async def metric_reaches(self, value: float, name: str, **labels: str) -> None:
        async with asyncio.timeout(5):
            while True:
                if await self.metric(name, **labels) == value:
                    return
                await asyncio.sleep(0.01)


@dataclass
class LeavingClient:
    """A client that can close its connection at any moment."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def sending(cls, made: Bench, path: str = COMPLETIONS, **fields: Any) -> LeavingClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
        body = json.dumps({**PROMPTS[path], **fields}).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> float:
        """When it left."""
        self.writer.close()
        await self.writer.wait_closed()
        return time.monotonic()


@contextmanager
def deaf_listener(port: int = 0) -> Iterator[int]:
    """A port on which connections are neither taken nor refused; its number."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            # What fills the queue of connections that nobody takes.
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> float:
    """Wait for a condition; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def turns(count: int = 20) -> None:
    """Let the loop go round: what would happen without a reason has happened by then."""
    for _ in range(count):
        await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(
    *,
    prefill: int = 1,
    decode: int = 1,
    colocated: int = 0,
    gate: str = "open",
    fenced: bool = False,
    committed: bool = True,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """A router with usable replicas in epoch 1. `fenced`: its engines have fences, each instance named after it.

    Not `committed`: nobody has told it about epochs, so nothing is usable.
    """
    async with AsyncExitStack() as stack:
        counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
        stubs: dict[str, list[StubEngine]] = {role: [] for role in counts}
        for role, count in counts.items():
            for number in range(count):
                stub = new_stub(role, number, fenced=fenced)
                stubs[role].append(await stack.enter_async_context(stub.running()))
        engines = [EngineEndpoint(name=stub.name, role=role, url=stub.url) for role in counts for stub in stubs[role]]
        router = await stack.enter_async_context(running(make_settings(engines, **settings), TOKEN))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        made = Bench(router=router, client=client, **stubs)
        if committed:
            await made.commit(1, "v1")
            await until(lambda: all(made.is_usable(each.name) for each in made.engines))
        await made.set_gate(gate)
        yield made


def new_stub(role: str, number: int, *, fenced: bool = False) -> StubEngine:
    name = f"{role}-{number}"
    fence = FenceState(instance=f"{name}.a") if fenced else None
    return StubEngine(name=name, fence=fence, token=TOKEN, handoff=HANDOFF if role == "prefill" else None)


def make_settings(engines: list[EngineEndpoint], **changes: Any) -> RouterSettings:
    values: dict[str, Any] = {
        "job": "test",
        "host": "127.0.0.1",
        "port": 0,
        "internal_host": "127.0.0.1",
        "internal_port": 0,
        "engines": engines,
        "handoff_lease_s": 30.0,
        "probe_interval_s": 0.1,
        "shutdown_grace_s": 0.2,
    }
    return RouterSettings.model_validate(values | changes)
