"""Asks each replica for its health, and the clock for idle sessions; tells the fleet.

One task per replica, so that a slow one delays no other. What a failed probe means is decided in `core/table.py`.
A task that ends by an exception is a mistake of ours: it is logged, and `main.py` ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Self

from router.core.fleet import Fleet
from router.core.table import Replica
from router.io.upstream import Upstream
from router.settings import RouterSettings

_log = logging.getLogger(__name__)


class Poller:
    """Runs as long as its context."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, upstream: Upstream) -> None:
        self._settings = settings
        self._fleet = fleet
        self._upstream = upstream
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, bool] = {}
        self.failed = asyncio.Event()
        """A task is dead: what the fleet knows grows old."""

    async def __aenter__(self) -> Self:
        loops = [self._probe(replica) for replica in self._fleet.table.replicas]
        self._tasks = [asyncio.create_task(each) for each in (*loops, self._expire())]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.critical("a task that watches the engines failed", exc_info=error)
            self.failed.set()

    async def _probe(self, replica: Replica) -> None:
        while True:
            failure = await self._upstream.probe(f"{replica.url}/health", self._settings.probe_timeout_s)
            if failure is None:
                self._fleet.probe_passed(replica.name)
            else:
                self._fleet.probe_failed(replica.name, failure, time.monotonic())
            self._say_if_changed(replica, failure)
            await asyncio.sleep(self._settings.probe_interval_s)

    def _say_if_changed(self, replica: Replica, failure: str | None) -> None:
        """One line per change, also for what failed legs changed since the last probe."""
        usable = self._fleet.table.is_usable(replica.name)
        if usable == self._said.get(replica.name, False):
            return
        self._said[replica.name] = usable
        if usable:
            _log.info("%s at %s is usable", replica.name, replica.url)
        else:
            _log.warning("%s at %s is out (last probe: %s)", replica.name, replica.url, failure or "passed")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_interval_s)
            self._fleet.expire_sessions(time.monotonic())
