"""Storage clients whose memory the master does not count, though they run: pure. `orchestrator/replica_keeper.py` asks
the master, and starts them again.

A master that was started again knows nobody. Clients notice within seconds and mount their memory anew; one that has
not done so in time is not waited for any longer.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from orchestrator.plan.types import StorageClientPlan

MOUNTS_WITHIN_S = 20.0
"""Seen on real ones: 3 s after a master that was away for 1 s, and less after one that was away for 45 s."""


def unmounted(clients: Collection[StorageClientPlan], segments: Set[tuple[str, int]]) -> set[str]:
    return {client.name for client in clients if not any(_is_of(client, *segment) for segment in segments)}


def _is_of(client: StorageClientPlan, host: str, port: int) -> bool:
    first, end = client.name_ports
    return host == client.address and first <= port < end


class Mounts:
    """Since when each is missed."""

    def __init__(self) -> None:
        self._missed_since: dict[str, float] = {}

    def overdue(self, missed: Set[str], now: float) -> set[str]:
        """`missed`: of those that run. Each is told once per time that it may take."""
        self._missed_since = {name: self._missed_since.get(name, now) for name in missed}
        late = {name for name, since in self._missed_since.items() if now - since > MOUNTS_WITHIN_S}
        for name in late:
            del self._missed_since[name]
        return late
