"""Which replicas exist, what each carries, and which of them may be used.

A `Member` is one life of one engine: another instance behind the same name or port is another member. `fleet.py` adds,
drains and removes members and tells the table what probes and legs showed; the policies only read. A
member starts down and without an epoch: nothing is routed to the unknown before its first good probe and before
the control plane has said which weights it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from router.core.breaker import Breaker, BreakerRules
from router.core.rates import Rate
from router.settings import EngineRole

if TYPE_CHECKING:
    from router.core.load import LoadIndex

LegFailure = Literal["unreachable", "broken", "timeout", "engine_error", "local"]
"""How a leg failed: no connection, or a replica that was lost meanwhile; connection lost before the end; no answer in
time; a 5xx or its like; the router's own machine ran out of something (files, ports, memory), which blames nobody."""

ProbeFailure = Literal["slow", "refused"]
"""How a probe failed: no answer in time; anything else (no connection, a status that is not 200)."""


@dataclass(frozen=True, kw_only=True)
class HealthRules:
    """When a replica counts as down."""

    probe_failures: int
    """Refused probes in a row that take a replica out."""
    silence_limit_s: float
    """A replica of which nothing was heard for so long hangs."""
    breaker: BreakerRules
    max_legs: int | None
    """Legs in flight that a replica takes; None: any number."""


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One replica in one life: facts, health, load."""

    name: str
    role: EngineRole
    url: str
    instance: str
    """Empty until someone tells it."""
    order: int
    """Number of its joining; never reused."""
    rules: HealthRules
    breaker: Breaker
    fenced: bool = False
    """Its fence has told its instance: an answer without one comes from something else."""
    epoch: int | None = None
    """Which weights it holds; None: unknown, or not confirmed."""
    draining: bool = False
    """Takes no new leg; those in flight go on."""
    alive: bool = False
    """What its probes say."""
    probes_failed: int = 0
    heard_at: float = float("-inf")
    """When it last answered a probe or sent bytes for a leg."""

    sessions: int = 0
    """Sessions pinned here."""
    tokens: int = 0
    """Estimated prompt tokens of the legs in flight."""
    legs: int = 0
    """Legs in flight."""
    handoffs_failed: int = 0
    """Handoffs of its own in a row whose decode leg failed, wherever that ran."""
    chosen: int = 0
    """Number of the choice that last put a session here; 0: never."""
    present: bool = False
    """Usable and with room: it may be chosen. Kept by `load.py`."""
    index: LoadIndex | None = None
    """Where it is indexed while it is usable."""
    entry: tuple[int, int, int, int, Member] | None = None
    """Its valid one in the heap of that index; other entries of it are void. None while it is not present."""
    drain: Rate = field(default_factory=Rate)
    """How fast the tokens in flight here become fewer."""

    @property
    def usable(self) -> bool:
        """May legs be sent to it, room aside?"""
        return self.alive and self.epoch is not None and not self.draining and self.breaker.state != "open"

    @property
    def has_room(self) -> bool:
        if self.breaker.state == "trial":
            return self.legs == 0
        return self.rules.max_legs is None or self.legs < self.rules.max_legs

    def is_silent(self, now: float) -> bool:
        """Was nothing heard of it for too long?"""
        return now - self.heard_at >= self.rules.silence_limit_s

    def probe_passed(self, now: float) -> None:
        """One good probe is enough to bring a replica back, once its breaker has rested."""
        self.probes_failed = 0
        self.alive = True
        self.heard_at = now
        self.breaker.probe_passed(now)

    def probe_failed(self, failure: ProbeFailure, now: float) -> None:
        """Take the replica out if it refused too often, or hangs: a slow probe alone says only that it is busy."""
        if failure == "slow":
            self.alive = self.alive and not self.is_silent(now)
            return
        self.probes_failed += 1
        if self.probes_failed >= self.rules.probe_failures:
            self.alive = False

    def leg_failed(self, failure: LegFailure, now: float) -> None:
        """Count a failed leg.

        A 5xx alone does not take a replica out: an engine also answers so when one request's KV was lost
        in the pool, and the same engine serves the next attempt well.
        """
        if failure != "local":
            self.breaker.leg_failed(now, at_once=failure == "unreachable")
