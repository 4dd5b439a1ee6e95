"""Plays a schedule on a fleet and returns what came of it. `check.py` and `test_stale.py` call it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from tests.stale.client import Clients
from tests.stale.fleet import Fleet
from tests.stale.judge import Reply
from tests.stale.schedule import Ask, Fault, Round, Schedule, Update

SETTLE_S = 1.0
"""Between rounds: blocks are saved behind a reply."""


@dataclass(frozen=True, kw_only=True)
class Played:
    schedule: Schedule
    replies: tuple[Reply, ...]
    pool_hits: int
    """Prompt tokens that prefill engines read from the pool."""
    updates: tuple[str, ...]
    """How each went."""
    seconds: float

    def __str__(self) -> str:
        outcomes = Counter(reply.outcome for reply in self.replies)
        mixed = sum(1 for reply in self.replies if reply.outcome == "whole" and not reply.single_version)
        return (
            f"{outcomes['whole']} whole, {mixed} mixed, {outcomes['left']} left, {outcomes['refused']} refused, "
            f"{self.pool_hits} tokens from the pool, updates {'; '.join(self.updates)}; {self.seconds:.0f} s in all"
        )


async def play(schedule: Schedule, fleet: Fleet) -> Played:
    """One round after the other."""
    began = time.monotonic()
    clients = Clients(fleet.url, schedule.seed)
    hits = _Hits(fleet)
    updates: list[str] = []
    for each in schedule.rounds:
        await _play_round(each, fleet, clients, updates)
        await asyncio.sleep(SETTLE_S)
        await asyncio.to_thread(hits.look)
    await asyncio.to_thread(fleet.recover)
    return Played(
        schedule=schedule,
        replies=tuple(clients.replies),
        pool_hits=hits.total,
        updates=tuple(updates),
        seconds=time.monotonic() - began,
    )


async def _play_round(each: Round, fleet: Fleet, clients: Clients, updates: list[str]) -> None:
    keeps = each.update is not None and each.update.in_flight == "keep"
    async with asyncio.TaskGroup() as tasks:
        for ask in each.asks:
            tasks.create_task(_ask(clients, ask, keeps))
        if (update := each.update) is not None:
            tasks.create_task(_update(fleet, update, updates))
        if (fault := each.fault) is not None:
            tasks.create_task(_suffer(fleet, fault))


async def _ask(clients: Clients, ask: Ask, keeps: bool) -> None:
    await asyncio.sleep(ask.starts_s)
    await clients.ask(ask, may_be_kept=keeps)


async def _update(fleet: Fleet, update: Update, updates: list[str]) -> None:
    await asyncio.sleep(update.starts_s)
    began = time.monotonic()
    why_not = await asyncio.to_thread(fleet.update, update)
    updates.append(f"{why_not or 'done'} in {time.monotonic() - began:.0f} s")


async def _suffer(fleet: Fleet, fault: Fault) -> None:
    await asyncio.sleep(fault.starts_s)
    await asyncio.to_thread(fleet.suffer, fault)


class _Hits:
    """Adds up counters that begin anew with each life of an engine."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen = fleet.pool_hits()
        self.total = 0

    def look(self) -> None:
        now = self._fleet.pool_hits()
        for name, count in now.items():
            before = self._seen.get(name, 0.0)
            self.total += int(count - before if count >= before else count)
        self._seen |= now
