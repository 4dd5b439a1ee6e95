"""What comes next of a request to scale a role: pure. `replica_keeper.py` sees, asks, and carries out.

    asked --nobody could serve--> refused
      |
      +--> begun --> who leaves is withdrawn, its legs end, its handoffs are read
                       --> planned: the job goes by the new plan --> who is new serves, who left has ended (done)
Planned is the turning point: processes without a place in the plan are ended, and places without a process are filled,
by whoever watches the job. Nobody may be moving weights then, for all that do are counted. What is not reached in its
time has failed: those that come behind it wait no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from connectors.types import Role
from orchestrator.replica_requests import End, Refuse, standing
from orchestrator.store.keeping import ReplicaRequest
from orchestrator.supervisor.restarts import Row
from orchestrator.supervisor.upkeep import LifeState
from router.core.fleet import ReplicaView


@dataclass(frozen=True, kw_only=True)
class Settle:
    """Wait for the handoffs of these prefill engines to be read."""

    names: tuple[str, ...]


ScaleAct = Literal["begin", "plan", "wait"] | Settle | Refuse | End


@dataclass(frozen=True, kw_only=True)
class ReplicaSight:
    """One replica of the role."""

    name: str
    role: Role
    state: LifeState
    given_up: Row | None
    replica: ReplicaView | None
    """As the router has it; None where that does not say, or does not know it."""
    is_settled: bool
    is_drained: bool
    """By a request of its own."""
    is_new: bool
    """Its life has begun since the request has."""

    @property
    def is_quiet(self) -> bool:
        return self.state != "ready" or (
            self.replica is not None and self.replica.draining and not self.replica.legs_in_flight
        )

    @property
    def has_arrived(self) -> bool:
        return self.state == "ready" and (self.is_drained or (self.replica is not None and self.replica.usable))


@dataclass(frozen=True, kw_only=True)
class ScaleSight:
    request: ReplicaRequest
    refusal: str
    """Why nobody should leave now; empty where they may."""
    is_moving: bool
    """Weights are updated, purged, or brought to engines that join."""
    is_planned: bool
    """The job goes by the new plan."""
    leaving: Sequence[ReplicaSight]
    staying: Sequence[ReplicaSight]
    """With those that are new, once the job goes by the new plan."""
    has_surplus: bool
    """A process without a place in the plan is left."""
    unended: str
    """Which of these would not end, in words."""
    drain_s: float
    since: float
    """When it was begun, or this keeper took it over, which goes by one plan."""
    serves_within_s: float
    """From then on."""


def next_scale_act(sight: ScaleSight, now: float) -> ScaleAct:
    request = sight.request
    if request.begun_at is None:
        if sight.is_moving:
            return "wait"
        return Refuse(why=sight.refusal) if sight.refusal and not request.is_forced else "begin"
    is_overdue = now - sight.since > sight.serves_within_s
    if sight.is_planned:
        return _after_plan(sight, is_overdue=is_overdue)
    act = _before_plan(sight, now)
    if act == "plan" or not is_overdue:
        return act
    missed = "weights still move" if sight.is_moving else "handoffs are still unread"
    return End(outcome="failed", note=f"{missed} after {sight.serves_within_s:g} s; nothing has changed, ask again")


def _before_plan(sight: ScaleSight, now: float) -> ScaleAct:
    assert sight.request.begun_at is not None
    is_late = now - sight.request.begun_at > sight.drain_s
    if not is_late and not all(each.is_quiet for each in sight.leaving):
        return "wait"
    unread = tuple(
        each.name for each in sight.leaving if each.role == "prefill" and each.state == "ready" and not each.is_settled
    )
    if unread:
        return Settle(names=unread)
    return "wait" if sight.is_moving else "plan"


def _after_plan(sight: ScaleSight, *, is_overdue: bool) -> ScaleAct:
    new = [each for each in sight.staying if each.is_new]
    is_ending = sight.has_surplus and not sight.unended
    awaited = [each for each in new if not each.has_arrived and each.given_up is None]
    if (is_ending or awaited) and not is_overdue:
        return "wait"
    lost = [f"{each.name} {each.given_up}" for each in new if each.given_up is not None]
    lost += [f"{each.name} is {standing(each.state)} after {sight.serves_within_s:g} s" for each in awaited]
    lost += ["who left has not ended"] if is_ending else []
    lost += [sight.unended] if sight.unended else []
    return End(outcome="failed", note="; ".join(lost)) if lost else End(outcome="done")
