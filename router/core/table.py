"""Which replicas exist and which of them may be used.

The list of replicas is fixed (it comes from the settings); their health moves with what the poller and the
requests tell. `fleet.py` joins it with load and sessions. A replica starts down: nothing is routed to
the unknown before its first good probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from router.settings import EngineRole

LegFailure = Literal["unreachable", "broken", "timeout", "engine_error"]
"""How a leg failed: no connection, or a replica that was lost meanwhile; connection lost before the end; no answer in
time; a 5xx or its like."""

ProbeFailure = Literal["slow", "refused"]
"""How a probe failed: no answer in time; anything else (no connection, a status that is not 200)."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One engine as the settings name it."""

    name: str
    role: EngineRole
    url: str


@dataclass(frozen=True, kw_only=True)
class HealthRules:
    """When a replica counts as down."""

    probe_failures: int
    """Failed probes in a row that take a replica out."""
    leg_failures: int
    """Failed legs in a row that take a replica out; one is enough where no connection could be made."""
    busy_window_s: float
    """A replica that sent bytes for an open request this recently is not judged by slow probes."""


@dataclass(slots=True)
class _Health:
    usable: bool = False
    probes_failed: int = 0
    legs_failed: int = 0
    last_byte: float = float("-inf")


class ReplicaTable:
    """The replicas and their health. The methods that can change it return True if it did."""

    def __init__(self, replicas: Iterable[Replica], rules: HealthRules) -> None:
        self.replicas = tuple(replicas)
        self._by_name = {replica.name: replica for replica in self.replicas}
        assert len(self._by_name) == len(self.replicas), "replica names are unique (checked by the settings)"
        self._health = {replica.name: _Health() for replica in self.replicas}
        self._rules = rules

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    def is_usable(self, name: str) -> bool:
        return self._health[name].usable

    def is_sending(self, name: str, now: float) -> bool:
        """Did it send bytes for an open request within the busy window?"""
        return now - self._health[name].last_byte <= self._rules.busy_window_s

    def of_role(self, role: EngineRole) -> tuple[Replica, ...]:
        return tuple(replica for replica in self.replicas if replica.role == role)

    def probe_passed(self, name: str) -> bool:
        """One good probe is enough to bring a replica back."""
        health = self._health[name]
        health.probes_failed = 0
        if health.usable:
            return False
        health.legs_failed = 0
        health.usable = True
        return True

    def probe_failed(self, name: str, failure: ProbeFailure, now: float) -> bool:
        """Count a failed probe. A slow one says nothing about a replica that is busy sending."""
        health = self._health[name]
        if failure == "slow" and self.is_sending(name, now):
            return False
        health.probes_failed += 1
        return self._take_out(health, health.probes_failed >= self._rules.probe_failures)

    def leg_succeeded(self, name: str) -> None:
        self._health[name].legs_failed = 0

    def leg_failed(self, name: str, failure: LegFailure) -> bool:
        """Count a failed leg.

        A 5xx alone does not take a replica out: an engine also answers so when one request's KV was lost
        in the pool, and the same engine serves the next attempt well.
        """
        health = self._health[name]
        health.legs_failed += 1
        return self._take_out(health, failure == "unreachable" or health.legs_failed >= self._rules.leg_failures)

    def byte_seen(self, name: str, now: float) -> None:
        self._health[name].last_byte = now

    @staticmethod
    def _take_out(health: _Health, due: bool) -> bool:
        changed = due and health.usable
        if due:
            health.usable = False
        return changed
