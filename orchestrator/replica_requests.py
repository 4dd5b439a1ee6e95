"""What comes next of a restart or drain that somebody asked for: pure. `replica_keeper.py` sees, asks, and carries out.

    asked --nobody could serve--> refused
      |
      +--> begun --> withdrawn: no new legs, those that run end --+--> drained (done)
                                                                  +--> settled: its handoffs are read (prefill engines)
                                                                         +--> another life --> serves (done)
Whatever dies meanwhile: a request has the life that it is to end, and so its begin is all that has to be recorded.
What does not serve in its time has failed, and goes on being brought up: those that come behind it wait no longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from connectors.types import Role
from orchestrator.plan.kinds import UnitKind
from orchestrator.store.keeping import ReplicaRequest, RequestOutcome, UnitEnd, drained
from orchestrator.supervisor.restarts import Row, row_of
from orchestrator.supervisor.state import UnitState
from orchestrator.supervisor.upkeep import LifeState
from orchestrator.weights.groups import serves
from orchestrator.weights.words import Fleet
from router.core.fleet import ReplicaView

HANDOFFS_FAILED = 3
"""In a row: then a prefill engine is not believed to hand over anything any more (A17)."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    why: str


@dataclass(frozen=True, kw_only=True)
class End:
    outcome: RequestOutcome
    note: str = ""


Act = Literal["begin", "settle", "replace", "wait"] | Refuse | End


@dataclass(frozen=True, kw_only=True)
class RequestSight:
    """A request that has not ended, and what is seen of its unit."""

    request: ReplicaRequest
    kind: UnitKind
    role: Role | None
    """Of an engine."""
    refusal: str
    """Why it should not be begun now; empty where it may."""
    life: str
    state: LifeState
    given_up: Row | None
    replica: ReplicaView | None
    """As the router has it; None where that does not say."""
    is_settled: bool
    is_drained: bool
    """Somebody wants it without requests, whatever life it has."""
    is_updating: bool
    """An update of the weights needs all engines until its end."""
    drain_s: float
    since: float
    """When it was begun, or this keeper took it over."""
    serves_within_s: float
    """From then on."""


def next_act(sight: RequestSight, now: float) -> Act:
    request = sight.request
    if request.begun_at is None:
        return "begin" if request.is_forced else _begin(sight)
    is_late = now - request.begun_at > sight.drain_s
    is_quiet = sight.replica is not None and sight.replica.draining and not sight.replica.legs_in_flight
    match request.kind:
        case "undrain" if sight.state != "ready" or (sight.replica is not None and sight.replica.usable):
            return End(outcome="done")
        case "undrain" if is_late:
            return End(outcome="done", note=f"{standing('ready')} after {sight.drain_s:g} s")
        case "undrain":
            return "wait"
        case "drain" if is_quiet or sight.state != "ready":
            return End(outcome="done")
        case "drain" if is_late:
            return End(outcome="done", note=f"requests still run there after {sight.drain_s:g} s")
        case "drain":
            return "wait"
    act = _restart(sight, may_end=is_quiet or is_late)
    if isinstance(act, End) or now - sight.since <= sight.serves_within_s:
        return act
    reached = standing(sight.state) if sight.life != request.life else "its life before has not ended"
    return End(outcome="failed", note=f"{reached} after {sight.serves_within_s:g} s")


def standing(state: LifeState) -> str:
    """Of what does not serve."""
    return "up, and does not serve" if state == "ready" else "not up"


def _restart(sight: RequestSight, *, may_end: bool) -> Act:
    """`may_end`: whether its requests are waited for no longer."""
    if sight.life != sight.request.life:
        return _after_restart(sight)
    if sight.kind != "engine" or sight.state != "ready":
        return "replace"
    if not may_end:
        return "wait"
    return "settle" if sight.role == "prefill" and not sight.is_settled else "replace"


def _begin(sight: RequestSight) -> Act:
    # Not whoever comes back: the update may need it.
    if sight.is_updating and sight.kind == "engine" and sight.request.kind != "undrain":
        return "wait"
    return Refuse(why=sight.refusal) if sight.refusal else "begin"


def _after_restart(sight: RequestSight) -> Act:
    if sight.given_up is not None:
        return End(outcome="failed", note=str(sight.given_up))
    serves_again = sight.kind != "engine" or sight.is_drained or (sight.replica is not None and sight.replica.usable)
    return End(outcome="done") if sight.state == "ready" and serves_again else "wait"


def refusal(
    unit: str, kind: UnitKind, fleet: Fleet, replicas: Mapping[str, ReplicaView] | None, leaving: frozenset[str]
) -> str:
    """Why this unit should not stop serving now; empty where the job serves without it. `replicas`: as the router has
    them, None where it does not say; `leaving`: those that others have asked to drain or restart."""
    if kind == "router":
        return "the job has one router: nobody is served while another life of it starts"
    if kind != "engine":
        return ""
    if replicas is None:
        return "the router does not answer, so nobody knows which engines serve"
    usable = {name: each.epoch for name, each in replicas.items() if each.usable and each.epoch is not None}
    others = {name: epoch for name, epoch in usable.items() if name != unit and name not in leaving}
    if unit not in usable or serves(others, fleet):
        return ""
    left = f"only {', '.join(others)}" if others else "no engine"
    return f"without {unit} {left} would serve, and a request needs a prefill and a decode engine of one epoch"


def withdrawn(requests: Sequence[ReplicaRequest], lives: Mapping[str, str]) -> frozenset[str]:
    """Who gets no requests now: what is drained, and what waits for its restart."""
    return drained(requests) | {each.unit for each in _restarting(requests) if lives.get(each.unit) == each.life}


def _restarting(requests: Sequence[ReplicaRequest]) -> list[ReplicaRequest]:
    return [each for each in requests if each.kind == "restart" and each.outcome is None and each.begun_at is not None]


@dataclass(frozen=True, kw_only=True)
class EngineLife:
    """When an engine's present life was started, and when it was ready; None: it is not yet."""

    role: Role
    started_at: float
    ready_at: float | None


def poisoned(lives: Mapping[str, EngineLife], replicas: Mapping[str, ReplicaView]) -> dict[str, str]:
    """Prefill engines whose last handoffs all failed, with a peer that was started again since they were ready (A17):
    what they know of that peer is of its earlier life. Why so, by name."""
    found = {}
    for name, life in lives.items():
        failed = replicas[name].handoffs_failed if name in replicas else 0
        if life.role != "prefill" or life.ready_at is None or failed < HANDOFFS_FAILED:
            continue
        ready_at = life.ready_at
        newer = [peer for peer, other in lives.items() if other.role == "decode" and other.started_at > ready_at]
        if newer:
            found[name] = f"its last {failed} handoffs failed, and {', '.join(newer)} was started since"
    return found


def troubles(
    states: Mapping[str, UnitState],
    kinds: Mapping[str, UnitKind],
    ends: Mapping[str, Sequence[UnitEnd]],
    requests: Sequence[ReplicaRequest],
) -> list[str]:
    """What is to be known of a job's processes beside their states: each row of ends that goes on by its first cause,
    who is drained, what is being done on request."""
    rows = ((name, row_of(kinds[name], ends[name])) for name in kinds if name in ends and states[name] != "ready")
    found = [f"{name} {row}{', given up' if row.is_spent else ''}" for name, row in rows if row.ends]
    found += [f"{each.unit} is being restarted: {each.why}" for each in _restarting(requests)]
    scaling = [each for each in requests if each.kind == "scale" and each.outcome is None]
    found += [f"{each.unit} is being scaled to {each.replicas}" for each in scaling]
    return found + [f"{name} is drained" for name in sorted(drained(requests))]
