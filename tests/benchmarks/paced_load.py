"""Open-loop load: requests fall due at a fixed rate, whether or not the earlier ones have been answered.

A latency counts from the moment that its request fell due, so a router that stalls pays for all requests that had to
wait meanwhile (no coordinated omission). `parts.py` asks for the peer's saturation rate and then for both latencies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle

from tests.benchmarks.connection import Connection, closed_loop
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.workload import CONNECTIONS

TICK_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Paced:
    """What came of a paced load, without its warm-up."""

    latencies_s: Sequence[float]
    """Of all requests that fell due; those still open at the end with the time that they had waited by then."""
    unanswered: int


class _Pacer:
    """Hands due requests to free connections; requests that find none free wait in line."""

    def __init__(self, requests: Sequence[bytes], rate: float, count: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests = cycle(requests)
        self._rate = rate
        self._count = count
        self._released = 0
        self._free: list[Connection] = []
        self._waiting: deque[float] = deque()
        self._sent: dict[Connection, float] = {}
        self._start = 0.0
        self.failed = 0
        self.finished = asyncio.Event()
        self.latencies: list[tuple[float, float]] = []
        """When a request fell due, counted from the start, and how long it then took."""

    def start(self, connections: list[Connection]) -> None:
        self._free = connections
        self._start = self._loop.time()
        self._tick()

    def _tick(self) -> None:
        now = self._loop.time() - self._start
        while self._released < self._count and (due := self._released / self._rate) <= now:
            self._released += 1
            self._waiting.append(due)
        while self._waiting and self._free:
            self._send(self._free.pop())
        if self._released < self._count:
            self._loop.call_later(TICK_S, self._tick)

    def _send(self, connection: Connection) -> None:
        self._sent[connection] = self._waiting.popleft()
        connection.send(next(self._requests))

    def replied(self, connection: Connection, status: int) -> None:
        due = self._sent.pop(connection)
        self.latencies.append((due, self._loop.time() - self._start - due))
        self.failed += status != 200
        if self._waiting:
            self._send(connection)
            return
        self._free.append(connection)
        if self._released == self._count and not self._sent:
            self.finished.set()

    def lost(self, _connection: Connection) -> None:
        self.failed += 1
        self.finished.set()

    def open_latencies(self) -> list[tuple[float, float]]:
        now = self._loop.time() - self._start
        return [(due, now - due) for due in (*self._sent.values(), *self._waiting)]


async def paced_load(
    port: int, requests: Sequence[bytes], *, rate: float, warm_s: float, seconds: float, patience_s: float = 2.0
) -> Paced:
    """Load a port; what is not answered `patience_s` after the last request fell due is given up."""
    pacer = _Pacer(requests, rate, round(rate * (warm_s + seconds)))
    connections = [await Connection.open(port, pacer) for _ in range(CONNECTIONS)]
    pacer.start(list(connections))
    with suppress(TimeoutError):
        await asyncio.wait_for(pacer.finished.wait(), warm_s + seconds + patience_s)
    unanswered = pacer.open_latencies()
    for connection in connections:
        connection.close()
    if pacer.failed:
        raise BenchmarkError(f"{pacer.failed} requests on port {port} failed")
    latencies = [taken for due, taken in (*pacer.latencies, *unanswered) if due >= warm_s]
    return Paced(latencies_s=latencies, unanswered=len(unanswered))


async def saturation_rate(port: int, requests: Sequence[bytes], *, warm_s: float, seconds: float) -> float:
    """Requests per second that 64 connections get through when each sends its next request at once."""
    await closed_loop(port, _until(warm_s, requests), connections=CONNECTIONS)
    return await closed_loop(port, _until(seconds, requests), connections=CONNECTIONS) / seconds


def _until(seconds: float, requests: Sequence[bytes]) -> Iterator[bytes]:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    for request in cycle(requests):
        if loop.time() >= end:
            return
        yield request
