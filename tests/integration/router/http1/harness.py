"""Over loopback sockets: raw clients for the router's HTTP server, scripted engines for its HTTP client."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from router.io.http1.client import Failure, HttpClient, OpenSocket
from router.io.http1.server import Application, Exchange, HttpServer, Limits, Request, Responder
from router.io.sockets import open_socket
from tests.integration.router.harness import until

both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Any], Any]
WAIT_S = 30.0
"""More than anything here takes, on any machine."""


def make_limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "max_body_bytes": 1_000_000,
        "max_header_bytes": 10_000,
        "header_timeout_s": 60.0,
        "body_timeout_s": 60.0,
        "idle_timeout_s": 60.0,
    }
    return Limits(**values | changes)


GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
"""The beginning of a head that goes on."""
_DATE = re.compile(rb"Date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n")
GET_AND_CLOSE = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


def echo(request: Request, responder: Responder) -> None:
    responder.reply(200, (("X-Path", request.path),), request.body)


def without_dates(replies: bytes) -> bytes:
    """What is the same whenever it is said."""
    return _DATE.sub(b"", replies)


class RawClient:
    """A client that says exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self, until: bytes) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return without_dates(await self.reader.readuntil(until))

    async def hear_all(self) -> bytes:
        """Until the server has closed."""
        async with asyncio.timeout(WAIT_S):
            return without_dates(await self.reader.read())

    async def reply(self) -> tuple[bytes, bytes]:
        """Head and body of a reply with a length."""
        head = await self.hear(b"\r\n\r\n")
        (length,) = [int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
        async with asyncio.timeout(WAIT_S):
            return head, await self.reader.readexactly(length)

    def reset(self) -> None:
        """Vanish with a RST."""
        made = self.writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Served:
    """A server, its clients, and what it refused."""

    def __init__(self, application: Application, limits: Limits) -> None:
        self.refused: list[int] = []
        self.server = HttpServer(application, limits, lambda status, _message: self.refused.append(status))
        self.port = 0
        self._clients: list[RawClient] = []

    async def client(self, read_ahead: int = 1024 * 1024) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port, limit=read_ahead))
        self._clients.append(client)
        return client

    async def ask(self, raw: bytes) -> bytes:
        """All that the server says until it closes."""
        client = await self.client()
        await client.say(raw)
        return await client.hear_all()

    async def close(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()
        await self.server.drain(0.0)


@asynccontextmanager
async def served(
    application: Application, *, bound: socket.socket | None = None, **limits: Any
) -> AsyncIterator[Served]:
    made = Served(application, make_limits(**limits))
    made.port = await made.server.start("127.0.0.1", 0, sock=bound)
    try:
        yield made
    finally:
        await made.close()
        assert made.server.connections == 0


class Held:
    """An application that leaves its requests open."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.responders: list[Responder] = []
        self.told: list[str] = []

    def __call__(self, request: Request, responder: Responder) -> Exchange:
        self.requests.append(request)
        self.responders.append(responder)
        return self

    def client_gone(self) -> None:
        self.told.append("gone")

    def client_writable(self, writable: bool) -> None:
        self.told.append("writable" if writable else "full")

    async def has(self, count: int) -> None:
        await until(lambda: len(self.requests) >= count)


HEAD = b"Content-Type: application/json\r\n"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Listener:
    """Keeps what a call tells."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.failure: Failure | None = None
        self.detail = ""
        self.outcomes = 0
        self.has_data = asyncio.Event()
        self._over = asyncio.Event()

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert not self.outcomes
        assert self.status == 0
        self.status, self.headers = status, headers

    def data(self, chunk: bytes) -> None:
        assert not self.outcomes
        assert self.status
        assert chunk
        self.body += chunk
        self.has_data.set()

    def ended(self) -> None:
        assert self.status
        self.outcomes += 1
        self._over.set()

    def failed(self, failure: Failure, detail: str) -> None:
        self.outcomes += 1
        self.failure, self.detail = failure, detail
        self._over.set()

    async def over(self) -> Listener:
        async with asyncio.timeout(WAIT_S):
            await self._over.wait()
        assert self.outcomes == 1
        return self


class EngineSide:
    """One connection as the scripted engine sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """The next request, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lengths = [int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
        return head + await self.reader.readexactly(lengths[0] if lengths else 0)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Until the other side has closed."""
        async with asyncio.timeout(WAIT_S):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass

    def reset(self) -> None:
        made = self.writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Engine:
    """Runs `script(connection, number)` for each connection, numbered from 0, and closes it when the script ends."""

    def __init__(self, script: Callable[[EngineSide, int], Awaitable[None]]) -> None:
        self._script = script
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._script(EngineSide(reader, writer), number)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def stop(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def engine(script: Callable[[EngineSide, int], Awaitable[None]]) -> AsyncIterator[Engine]:
    made = Engine(script)
    listening = await asyncio.start_server(made.accept, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
        await made.stop()


@asynccontextmanager
async def http_client(opener: OpenSocket = open_socket, **changes: float) -> AsyncIterator[HttpClient]:
    values: dict[str, float] = {"keepalive_s": 60.0, "connect_timeout_s": 60.0} | changes
    client = HttpClient(**values, open_socket=opener)
    try:
        yield client
    finally:
        await client.close()


async def serving(at: EngineSide, _number: int) -> None:
    while True:
        await at.request()
        await at.say(REPLY)


async def ask(client: HttpClient, there: Engine) -> Listener:
    listener = Listener()
    client.send(there.url, "POST", HEAD, b"{}", listener)
    return await listener.over()
