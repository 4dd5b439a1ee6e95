"""Streams relayed by a router: many clients read, the decode stubs send each of them 50 tokens per second.

`parts.py` asks for a router's CPU time per token. The window begins when every stream flows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import httptools

from tests.benchmarks.processes import BenchmarkError, CpuMeter
from tests.benchmarks.routers import Router
from tests.benchmarks.workload import completion_body, http_request, session_ids

STREAMS = 256
TOKENS_PER_S = 50.0
TOKEN_IDS = 500
FLOW_S = 20.0
END_OF_EVENT = b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """One window."""

    cpu_us_per_token: float
    tokens_per_s: float


class Reader(asyncio.Protocol):
    """One client: counts the events of its stream."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._ended_in_newline = False
        self.events = 0
        self.is_open = True
        self.is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _error: Exception | None) -> None:
        self.is_open = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.is_refused = self._parser.get_status_code() != 200

    def on_body(self, data: bytes) -> None:
        # An event's end may come in two pieces.
        self.events += data.count(END_OF_EVENT) + (self._ended_in_newline and data[:1] == b"\n")
        self._ended_in_newline = data[-1:] == b"\n" and data[-2:] != END_OF_EVENT


async def measure_streams(router: Router, *, seconds: float) -> Streamed:
    """Open the streams, let them flow, count for so many seconds, leave."""
    loop = asyncio.get_running_loop()
    readers = []
    body = completion_body(TOKEN_IDS, stream=True)
    for session in session_ids(STREAMS):
        _, reader = await loop.create_connection(Reader, "127.0.0.1", router.port)
        reader.transport.write(http_request(body, session))
        readers.append(reader)
    try:
        await _flowing(readers)
        await asyncio.sleep(1.0)
        before, meter = sum(reader.events for reader in readers), CpuMeter(router.process.pid)
        await asyncio.sleep(seconds)
        used_s, elapsed_s = meter.used_s(), meter.elapsed_s()
        tokens = sum(reader.events for reader in readers) - before
        _check(readers)
        return Streamed(cpu_us_per_token=used_s / tokens * 1e6, tokens_per_s=tokens / elapsed_s)
    finally:
        for reader in readers:
            reader.transport.abort()


async def _flowing(readers: list[Reader]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + FLOW_S
    while not all(reader.events for reader in readers):
        _check(readers)
        if loop.time() > deadline:
            flowing = sum(reader.events > 0 for reader in readers)
            raise BenchmarkError(f"after {FLOW_S:g} s {flowing} of {len(readers)} streams flow")
        await asyncio.sleep(0.05)


def _check(readers: list[Reader]) -> None:
    ended = sum(not reader.is_open for reader in readers)
    refused = sum(reader.is_refused for reader in readers)
    if ended or refused:
        raise BenchmarkError(f"of {len(readers)} streams {ended} ended early and {refused} were refused")
