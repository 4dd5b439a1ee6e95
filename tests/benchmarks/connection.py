"""Keep-alive connections of the generators that wrk can't be: one request at a time, replies read to their end.

`paced_load.py` and `idle_sessions.py` build their loads from `Connection`; `closed_loop` is the simplest of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol, cast

import httptools

from tests.benchmarks.processes import BenchmarkError


class Owner(Protocol):
    """Who uses a connection."""

    def replied(self, connection: Connection, status: int) -> None:
        """A whole reply was read; the connection is free."""

    def lost(self, connection: Connection) -> None:
        """The router closed the connection."""


class Connection(asyncio.Protocol):
    """A connection to a router."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._is_ours_to_close = False

    @classmethod
    async def open(cls, port: int, owner: Owner) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(owner), "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _error: Exception | None) -> None:
        if not self._is_ours_to_close:
            self._owner.lost(self)

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def close(self) -> None:
        self._is_ours_to_close = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._owner.replied(self, self._parser.get_status_code())


class _ClosedLoop:
    """Each connection sends its next request when the last one is answered."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._busy = 0
        self.answered = 0
        self.failed = 0
        self.ended = asyncio.Event()

    def send(self, connection: Connection) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._busy += 1
            connection.send(request)
        elif not self._busy:
            self.ended.set()

    def replied(self, connection: Connection, status: int) -> None:
        self._busy -= 1
        self.answered += status == 200
        self.failed += status != 200
        self.send(connection)

    def lost(self, _connection: Connection) -> None:
        self.failed += 1
        self.ended.set()


async def closed_loop(port: int, requests: Iterator[bytes], *, connections: int) -> int:
    """Send all requests over so many connections; how many were answered, which is all of them."""
    load = _ClosedLoop(requests)
    opened = [await Connection.open(port, load) for _ in range(connections)]
    for connection in opened:
        load.send(connection)
    await load.ended.wait()
    for connection in opened:
        connection.close()
    if load.failed:
        raise BenchmarkError(f"{load.failed} requests on port {port} failed")
    return load.answered
