"""Drives an ASGI middleware by hand: an app for it to stand around, and requests whose every message a test sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from connectors.vllm_plugin.fence import App, Message, Receive, Scope, Send

TOKEN = "the-secret"
BEARER = {"authorization": f"Bearer {TOKEN}"}


class Inner:
    """Answers with the status that its path is given; subclasses replace `answer`."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []
        self.statuses: dict[str, int] = {}
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.entered.set()
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
        else:
            self.bodies.append(await whole(receive))
            await self.answer(scope, send)

    async def answer(self, scope: Scope, send: Send) -> None:
        status = self.statuses.get(scope["path"], 200)
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-inner", b"yes")]})
        await send({"type": "http.response.body", "body": b"done"})


class Streaming(Inner):
    """Sends its second piece once it is released."""

    async def answer(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await self.release.wait()
        await send({"type": "http.response.body", "body": b"two"})


async def whole(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


@dataclass
class Exchange:
    """One request, and what has come back so far."""

    incoming: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    sent: list[Message] = field(default_factory=list)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """The app has read something."""
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def receive(self) -> Message:
        message = await self.incoming.get()
        self.taken.set()
        return message

    async def send(self, message: Message) -> None:
        async with self.arrived:
            self.sent.append(message)
            self.arrived.notify_all()

    async def until_sent(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.sent) >= count)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


PLAIN_ENGINE = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls="")))
"""An engine client whose ranks know nothing of us."""


def scope_of(method: str, path: str, headers: dict[str, str], **more: Any) -> Scope:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    app = SimpleNamespace(state=SimpleNamespace(engine_client=PLAIN_ENGINE))
    return {"type": "http", "method": method, "path": path, "headers": raw, "app": app} | more


async def call(
    app: App,
    /,
    method: str,
    path: str,
    headers: dict[str, str] = BEARER,
    pieces: Iterable[bytes] = (b"{}",),
    **more: Any,
) -> Exchange:
    exchange = Exchange()
    *first, last = pieces
    for piece in first:
        exchange.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": True})
    exchange.incoming.put_nowait({"type": "http.request", "body": last})
    await app(scope_of(method, path, headers, **more), exchange.receive, exchange.send)
    return exchange
