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

from router.main import RunningRouter, running
from router.settings import EngineEndpoint, RouterSettings
from tests.fakes.stub_engine import HANDOFF, StubEngine

TOKEN = "the-token"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


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

    async def post(
        self, path: str = COMPLETIONS, body: Any = None, session: str | None = None, **fields: Any
    ) -> Answer:
        headers = {"x-session-id": session} if session is not None else {}
        sent = body if isinstance(body, bytes) else json.dumps(body or {"prompt": "hello", **fields}).encode()
        async with self.client.post(self.url + path, data=sent, headers=headers) as reply:
            return Answer(reply.status, reply.headers, await reply.read())

    async def get(self, path: str) -> Answer:
        async with self.client.get(self.url + path) as reply:
            return Answer(reply.status, reply.headers, await reply.read())

    async def finish(self, session: str) -> Answer:
        return await self.post("/finish_session", {"session_id": session})

    async def set_gate(self, state: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.client.post(self.admin_url + "/gate", json={"gate": state}, headers=headers) as reply:
            assert reply.status == 200

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        text = (await self.get("/metrics")).raw.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        full = "headrace_router_" + name
        return sum(each.value for each in samples if each.name == full and labels.items() <= each.labels.items())


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


@asynccontextmanager
async def bench(
    *, prefill: int = 1, decode: int = 1, colocated: int = 0, gate: str = "open", **settings: Any
) -> AsyncIterator[Bench]:
    """A router with open gate and usable replicas."""
    async with AsyncExitStack() as stack:
        counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
        stubs: dict[str, list[StubEngine]] = {role: [] for role in counts}
        for role, count in counts.items():
            for number in range(count):
                stub = StubEngine(name=f"{role}-{number}", handoff=HANDOFF if role == "prefill" else None)
                stubs[role].append(await stack.enter_async_context(stub.running()))
        engines = [EngineEndpoint(name=stub.name, role=role, url=stub.url) for role in counts for stub in stubs[role]]
        router = await stack.enter_async_context(running(make_settings(engines, **settings), TOKEN))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        made = Bench(router=router, client=client, **stubs)
        await until(lambda: all(view.usable for view in router.services.fleet.views()))
        await made.set_gate(gate)
        yield made


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
