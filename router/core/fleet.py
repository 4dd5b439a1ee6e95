"""The replicas, their health, their load and the sessions on them, kept in step with each other.

`flow.py` places and releases its legs here, `io/poller.py` reports probes, `io/server.py` finishes sessions,
`io/admin.py` and `io/metrics.py` read snapshots, `io/upstream.py` is told of lost replicas. A reservation counts from
the moment of the choice, not of a reply, so that a burst spreads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from router.core.gate import Gate
from router.core.load import LoadIndex
from router.core.policies import ChoiceContext, make_policy
from router.core.sessions import Pin, Session, Sessions
from router.core.table import HealthRules, LegFailure, ProbeFailure, Replica, ReplicaTable
from router.settings import EngineRole, RouterSettings, StickyLeastLoaded

ROLES: tuple[EngineRole, ...] = get_args(EngineRole)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLost:
    """A replica is out: its legs in flight can no longer be counted on."""

    replica: str
    silent: bool
    """It sent no byte of late. Otherwise it still serves streams, and those that have begun go on (field case A15)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """One leg's place on one replica; released exactly once."""

    number: int
    replica: str
    role: EngineRole
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a request can be served now."""

    kind: Literal["split", "single"]
    missing: EngineRole | None
    """A role without a usable replica, if that stands in the way."""


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica as /state and /metrics show it."""

    name: str
    role: EngineRole
    url: str
    usable: bool
    active_sessions: int
    legs_in_flight: int
    tokens_in_flight: int


class Fleet:
    """See the module text."""

    def __init__(self, settings: RouterSettings) -> None:
        replicas = [Replica(name=each.name, role=each.role, url=each.url.rstrip("/")) for each in settings.engines]
        rules = HealthRules(
            probe_failures=settings.probe_failures,
            leg_failures=settings.leg_failures,
            busy_window_s=settings.probe_interval_s + settings.probe_timeout_s,
        )
        self.table = ReplicaTable(replicas, rules)
        self.load = {role: LoadIndex(each.name for each in self.table.of_role(role)) for role in ROLES}
        policy = settings.policy
        self.sessions = Sessions(policy.session_idle_s if isinstance(policy, StickyLeastLoaded) else None)
        self._policies = {role: make_policy(policy) for role in ROLES}
        self._open: set[int] = set()
        self._numbers = 0
        self._tell_loss: Callable[[ReplicaLost], None] = lambda _lost: None

    def report_losses(self, listener: Callable[[ReplicaLost], None]) -> None:
        """Tell `listener` of each lost replica, so that the shell ends the legs there."""
        self._tell_loss = listener

    def layout(self) -> Layout:
        """Pairs where both roles have a usable replica, else colocated replicas, else what is missing."""
        if self.load["prefill"].present_count and self.load["decode"].present_count:
            return Layout(kind="split", missing=None)
        if self.load["colocated"].present_count:
            return Layout(kind="single", missing=None)
        pair: tuple[EngineRole, ...] = ("prefill", "decode")
        if any(self.table.of_role(role) for role in pair):
            return Layout(kind="split", missing=next(role for role in pair if not self.load[role].present_count))
        return Layout(kind="single", missing="colocated")

    def begin_request(self, session_id: str | None) -> Session:
        return self.sessions.begin_request(session_id)

    def end_request(self, session: Session, now: float) -> None:
        self._unpin(self.sessions.end_request(session, now))

    def finish_session(self, session_id: str) -> None:
        self._unpin(self.sessions.finish(session_id))

    def expire_sessions(self, now: float) -> None:
        self._unpin(self.sessions.expire(now))

    def place(
        self, session: Session, role: EngineRole, *, tokens: int, avoid: frozenset[str] = frozenset()
    ) -> Reservation | None:
        """Choose a replica for a leg and reserve it; None if no replica of the role is usable."""
        load = self.load[role]
        pinned = session.pins.get(role)
        name = self._policies[role].choose(ChoiceContext(pinned=pinned, avoid=avoid), load)
        if name is None:
            return None
        if name != pinned:
            replaced = self.sessions.pin(session, role, name)
            self._unpin([replaced] if replaced is not None else [])
            load.change(name, sessions=1)
            load.mark_chosen(name)
        load.change(name, tokens=tokens, legs=1)
        self._numbers += 1
        self._open.add(self._numbers)
        return Reservation(number=self._numbers, replica=name, role=role, tokens=tokens)

    def release(self, reservation: Reservation) -> None:
        assert reservation.number in self._open, f"{reservation} was released before"
        self._open.discard(reservation.number)
        self.load[reservation.role].change(reservation.replica, tokens=-reservation.tokens, legs=-1)

    def leg_succeeded(self, name: str) -> None:
        self.table.leg_succeeded(name)

    def leg_failed(self, name: str, failure: LegFailure) -> None:
        if self.table.leg_failed(name, failure):
            self._lose(name)
            self._tell_loss(ReplicaLost(replica=name, silent=False))

    def byte_seen(self, name: str, now: float) -> None:
        self.table.byte_seen(name, now)

    def probe_passed(self, name: str) -> None:
        if self.table.probe_passed(name):
            self.load[self.table[name].role].set_present(name, True)

    def probe_failed(self, name: str, failure: ProbeFailure, now: float) -> None:
        if self.table.probe_failed(name, failure, now):
            self._lose(name)
        if not self.table.is_usable(name):
            # Again with each failed probe: a stream that went on when the replica was lost may have fallen silent.
            self._tell_loss(ReplicaLost(replica=name, silent=not self.table.is_sending(name, now)))

    def usable(self) -> list[Replica]:
        return [replica for replica in self.table.replicas if self.table.is_usable(replica.name)]

    def views(self) -> list[ReplicaView]:
        return [self._view(replica) for replica in self.table.replicas]

    def _view(self, replica: Replica) -> ReplicaView:
        load = self.load[replica.role][replica.name]
        return ReplicaView(
            name=replica.name,
            role=replica.role,
            url=replica.url,
            usable=self.table.is_usable(replica.name),
            active_sessions=load.sessions,
            legs_in_flight=load.legs,
            tokens_in_flight=load.tokens,
        )

    def _lose(self, name: str) -> None:
        self.load[self.table[name].role].set_present(name, False)
        self._unpin(self.sessions.lose_replica(name))

    def _unpin(self, pins: list[Pin]) -> None:
        for pin in pins:
            self.load[pin.role].change(pin.replica, sessions=-1)


def not_ready_reason(fleet: Fleet, gate: Gate) -> str | None:
    """Why no new request can be served now; None if one can."""
    if not gate.may_start:
        return gate_message(gate)
    missing = fleet.layout().missing
    return missing_message(missing) if missing is not None else None


def gate_message(gate: Gate) -> str:
    return f"the router's gate is {gate.state}: requests are not sent to engines now"


def missing_message(role: EngineRole) -> str:
    return f"no usable {role} replica"
