"""Asks each replica for its health, and the clock for idle sessions and long waits; tells the dispatcher.

One task per replica, so that a slow one delays no other. What a failed probe means is decided in `core/table.py`.
A task that ends by an exception is a mistake of ours: it is logged, and `main.py` ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Self

from router.core.table import Member
from router.io.desk import Desk
from router.io.upstream import Upstream
from router.settings import RouterSettings

_log = logging.getLogger(__name__)

TICK_S = 0.25


class Poller:
    """Runs as long as its context."""

    def __init__(self, settings: RouterSettings, desk: Desk, upstream: Upstream) -> None:
        self._interval_s = settings.probe_interval_s
        self._patience_s = min(settings.probe_timeout_s, settings.silence_limit_s)
        self._desk = desk
        self._fleet = desk.dispatcher.fleet
        self._upstream = upstream
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._clock: asyncio.Task[None] | None = None
        self._probed: dict[str, Member] = {}
        """Whom each probe looks at."""
        self._said: dict[str, bool] = {}
        self.failed = asyncio.Event()
        """A task is dead: what the fleet knows grows old."""

    async def __aenter__(self) -> Self:
        self._clock = self._start(self._tick())
        self.follow_members()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [each for each in (self._clock, *self._probes.values()) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow_members(self) -> None:
        """Replicas have come or gone: probe those that are there."""
        members = self._fleet.members
        for name in [each for each in self._probes if members.get(each) is not self._probed.get(each)]:
            # Gone, or in another life, whose probe does not wait for the old one's.
            self._probes.pop(name).cancel()
            self._said.pop(name, None)
        for name in members:
            if name not in self._probes:
                self._probed[name] = members[name]
                self._probes[name] = self._start(self._probe(name))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.critical("a task that watches the engines failed", exc_info=error)
            self.failed.set()

    async def _probe(self, name: str) -> None:
        while True:
            member = self._probed[name] = self._fleet.members[name]
            found = await self._upstream.probe(member.url, self._patience_s)
            now = time.monotonic()
            if self._fleet.members.get(name) is not member:
                continue  # another life of it was announced meanwhile
            if isinstance(found, str):
                self._fleet.probe_failed(name, found, now)
            elif self._fleet.recognise(name, found.instance, now):
                self._fleet.probe_passed(name, now)
            else:
                _log.warning("%s at %s is another instance now: %s", name, member.url, found.instance)
            self._say_if_changed(name, found if isinstance(found, str) else None)
            await asyncio.sleep(self._interval_s)

    def _say_if_changed(self, name: str, failure: str | None) -> None:
        """One line per change, also for what failed legs changed since the last probe."""
        member = self._fleet.members[name]
        if member.usable == self._said.get(name, False):
            return
        self._said[name] = member.usable
        self._desk.look_again()
        if member.usable:
            _log.info("%s at %s is usable", name, member.url)
        else:
            _log.warning("%s at %s is out (last probe: %s)", name, member.url, failure or "passed")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._desk.tick()
