"""What a session costs a router that has nothing to do for it: memory, with and without an open connection.

`parts.py` starts a fresh router for each measurement: a process that was busy has freed memory to reuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.connection import Connection, closed_loop
from tests.benchmarks.processes import BenchmarkError, open_files, resident_mb
from tests.benchmarks.routers import Router
from tests.benchmarks.workload import CONNECTIONS, completion_body, http_request, session_ids

SETTLE_S = 1.0
TOKEN_IDS = 500
WARM_UP_REQUESTS = 3_000
"""Of one session: after these, growth is due to what is kept."""


@dataclass(frozen=True, kw_only=True)
class IdleCost:
    """Growth of resident memory, in megabytes."""

    sessions_mb: float
    """Sessions known to the router, connections closed."""
    both_mb: float
    """Sessions and, for each, one open connection that has carried a request."""


class _Keeper:
    """Keeps every connection that has its answer; at most so many wait for one at a time."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(CONNECTIONS)
        self.failed = 0

    def replied(self, _connection: Connection, status: int) -> None:
        self.failed += status != 200
        self.turns.release()

    def lost(self, _connection: Connection) -> None:
        self.failed += 1
        self.turns.release()


async def measure_idle_sessions(router: Router, *, sessions: int) -> IdleCost:
    """Warm the router up, make the sessions known, then open a connection for each."""
    pid = router.process.pid
    await closed_loop(router.port, _requests(["warm-up"] * WARM_UP_REQUESTS), connections=CONNECTIONS)
    base_mb = await _settled_mb(pid)
    await closed_loop(router.port, _requests(session_ids(sessions)), connections=CONNECTIONS)
    sessions_mb = await _settled_mb(pid) - base_mb

    keeper, connections = _Keeper(), []
    for request in _requests(session_ids(sessions)):
        await keeper.turns.acquire()
        connection = await Connection.open(router.port, keeper)
        connection.send(request)
        connections.append(connection)
    for _ in range(CONNECTIONS):
        await keeper.turns.acquire()
    both_mb = await _settled_mb(pid) - base_mb
    still_open = open_files(pid)
    for connection in connections:
        connection.close()
    if keeper.failed or still_open < sessions:
        raise BenchmarkError(
            f"{keeper.failed} of {sessions} connections were refused or closed by {router.process.name}, "
            f"which had {still_open} open files"
        )
    return IdleCost(sessions_mb=sessions_mb, both_mb=both_mb)


async def _settled_mb(pid: int) -> float:
    await asyncio.sleep(SETTLE_S)
    return resident_mb(pid)


def _requests(names: list[str]) -> Iterator[bytes]:
    body = completion_body(TOKEN_IDS)
    return (http_request(body, name) for name in names)
