"""The replicas, their load, the sessions on them: one object that every request shares.

`dispatcher.py` chooses and reserves through it, the shell tells it what probes showed. All changes of the load go
through here, so that the sum of reservations and pins always equals what `load.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from router.core.asks import LegEnd, LegOutcome, Reason
from router.core.breaker import Breaker, BreakerRules
from router.core.load import LoadIndex
from router.core.policies import NOBODY, ChoiceContext, make_policy
from router.core.rates import MoveRates, Rate
from router.core.records import SessionRecord
from router.core.sessions import Session, Sessions
from router.core.table import HealthRules, Member, ProbeFailure
from router.settings import EngineRole, RouterSettings, StickyLeastLoaded

ROLES: tuple[EngineRole, ...] = ("prefill", "decode", "colocated")
_ANSWERED: tuple[LegOutcome, ...] = ("ok", "client_error", "engine_error")
"""How legs end of which the engine said so."""
_SERVED: tuple[LegOutcome, ...] = ("ok", "client_error")
_UNREAD: tuple[LegOutcome, ...] = ("engine_error", "timeout")
"""How decode legs end that may have failed to fetch their handoff. A lost connection says nothing of it."""


class Reservation(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A leg's place on a member, from the choice to the end of the leg."""

    ticket: int
    member: Member
    session: Session
    tokens: int
    epoch: int
    """The member's, when the leg was placed."""
    ahead: int
    """Tokens in flight there, the leg's own included, when it was placed."""
    reason: Reason
    fresh: bool
    """Nothing of the session was known to any engine before."""


@dataclass(frozen=True, kw_only=True)
class ReplicaLost:
    """A replica was taken out of use. `silent`: not even a stream that has begun sends bytes any more."""

    replica: str
    instance: str
    silent: bool


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica as /state and /metrics show it."""

    name: str
    role: EngineRole
    url: str
    instance: str
    epoch: int | None
    usable: bool
    draining: bool
    breaker: Literal["closed", "open", "trial"]
    active_sessions: int
    legs_in_flight: int
    tokens_in_flight: int
    handoffs_failed: int
    """In a row; of a prefill replica."""


class Fleet:
    """See the module text."""

    def __init__(self, settings: RouterSettings) -> None:
        self._rules = HealthRules(
            probe_failures=settings.probe_failures,
            silence_limit_s=settings.silence_limit_s,
            max_legs=settings.max_legs_per_replica,
            breaker=BreakerRules(
                failures=settings.leg_failures, open_s=settings.breaker_open_s, max_open_s=settings.breaker_max_open_s
            ),
        )
        policy = settings.policy
        self.members: dict[str, Member] = {}
        self.sessions = Sessions(policy.session_idle_s if isinstance(policy, StickyLeastLoaded) else None)
        self._policies = {role: make_policy(policy) for role in ROLES}
        self._rates = {role: MoveRates(cold=Rate(), pool=Rate()) for role in ROLES}
        self._indexes: dict[EngineRole, dict[int, LoadIndex]] = {role: {} for role in ROLES}
        self.paired: list[int] = []
        """Epochs in which both a prefill and a decode replica are usable, newest first."""
        self.alone: list[int] = []
        """The same for colocated replicas."""
        self._open: dict[int, Reservation] = {}
        self._restorable: dict[str, list[tuple[SessionRecord, str]]] = {}
        """Pins of an earlier router by replica, with the instance that they belong to."""
        self._tickets = self._orders = self._choices = 0
        self._tell_loss: Callable[[ReplicaLost], None] = lambda _lost: None
        for engine in settings.engines:
            self.add(name=engine.name, role=engine.role, url=engine.url, instance="")

    def report_losses(self, listener: Callable[[ReplicaLost], None]) -> None:
        """Tell `listener` of each lost replica, so that the shell ends the legs there."""
        self._tell_loss = listener

    # -- members -------------------------------------------------------------------------------------------

    def add(self, *, name: str, role: EngineRole, url: str, instance: str) -> Member:
        """A new life of a replica; an earlier one of the same name is gone with its sessions. The same life again goes
        on as it is: whoever adds it can't always know whether an earlier try came through."""
        known = self.members.get(name)
        if known is not None:
            if instance and (known.role, known.url, known.instance) == (role, url, instance):
                self.drain(name, False)
                return known
            self.remove(name)
        self._orders += 1
        member = Member(
            name=name,
            role=role,
            url=url,
            instance=instance,
            order=self._orders,
            rules=self._rules,
            breaker=Breaker(self._rules.breaker),
        )
        self.members[name] = member
        return member

    def remove(self, name: str) -> None:
        """Forget a replica. Legs that it still holds end as their connections do."""
        member = self.members.pop(name)
        member.draining = True
        self._refresh(member)
        self._lose_sessions(member)
        self._tell_loss(ReplicaLost(replica=name, instance=member.instance, silent=True))

    def drain(self, name: str, draining: bool = True) -> None:
        """No new leg goes there and its sessions move with their next request, until it is no longer drained."""
        member = self.members[name]
        member.draining = draining
        self._refresh(member)
        if draining:
            self._lose_sessions(member)

    def confirm(self, name: str, epoch: int | None) -> None:
        """What weights a replica holds, as the control plane has confirmed; None: it no longer knows."""
        member = self.members[name]
        if member.epoch != epoch:
            self._refresh(member, leave=True)
            member.epoch = epoch
        self._refresh(member)

    def recognise(self, name: str, instance: str, now: float) -> bool:
        """A probe met this instance. False: another life than the known one; it replaces it, unconfirmed."""
        member = self.members[name]
        if not member.instance:
            member.instance = instance
        lost_its_fence = not instance and member.fenced
        member.fenced = member.fenced or bool(instance)
        if member.instance == instance or (not instance and not lost_its_fence):
            self._restore_pins(member, now)
            return True
        self.add(name=name, role=member.role, url=member.url, instance=instance).probe_passed(now)
        return False

    def probe_passed(self, name: str, now: float) -> None:
        member = self.members[name]
        member.probe_passed(now)
        self._refresh(member)

    def probe_failed(self, name: str, failure: ProbeFailure, now: float) -> None:
        member = self.members[name]
        was_usable = member.usable
        member.probe_failed(failure, now)
        if member.usable:
            return
        self._refresh(member)
        if was_usable:
            self._lose_sessions(member)
        if not member.alive:
            # Again with each failed probe: a stream that went on when the replica was lost may have fallen silent.
            self._tell_loss(ReplicaLost(replica=name, instance=member.instance, silent=member.is_silent(now)))

    def byte_seen(self, name: str, now: float) -> None:
        member = self.members.get(name)
        if member is not None:
            member.heard_at = now

    # -- what may be chosen --------------------------------------------------------------------------------

    def usable_count(self, role: EngineRole) -> int:
        return sum(map(len, self._indexes[role].values()))

    def is_served(self, role: EngineRole, epoch: int) -> bool:
        """Has this role a usable replica in this epoch?"""
        return epoch in self._indexes[role]

    def place(
        self,
        session: Session,
        role: EngineRole,
        epochs: Sequence[int],
        *,
        tokens: int,
        now: float,
        avoid: frozenset[str] = NOBODY,
        key: str = "",
    ) -> Reservation | None:
        """Choose a replica for a leg and reserve it; None if no replica of these epochs has room."""
        by_epoch = self._indexes[role]
        indexes = [by_epoch[epoch] for epoch in epochs if epoch in by_epoch]
        if not indexes:
            return None
        policy, pinned = self._policies[role], session.pin_of(role)
        choice = policy.choose(
            ChoiceContext(
                key=session.id or key,
                pinned=pinned,
                avoid=avoid,
                prefix_tokens=session.known_tokens,
                moved_at=session.moved_at,
                rates=self._rates[role],
                now=now,
            ),
            indexes,
        )
        if choice is None:
            return None
        member, reason = choice.member, choice.reason
        if reason == "new" and session.lost:
            reason = "moved_lost"
        fresh = not session.prefilled and not session.known_tokens
        if member is not pinned:
            replaced = self.sessions.pin(session, role, member)
            if replaced is not None:
                self._change_sessions(replaced, -1)
            if reason == "moved_wait":
                session.moved_at = now
            self._choices += 1
            member.sessions += 1
            member.chosen = self._choices
        self._tickets += 1
        member.tokens += tokens
        member.legs += 1
        if not member.has_room:
            self._touch(member)
        assert member.epoch is not None, f"{member.name} was chosen without an epoch"
        made = self._open[self._tickets] = Reservation(
            ticket=self._tickets,
            member=member,
            session=session,
            tokens=tokens,
            epoch=member.epoch,
            ahead=member.tokens,
            reason=reason,
            fresh=fresh,
        )
        return made

    def end_leg(self, end: LegEnd, now: float) -> Reservation:
        """A leg is over: give its place back, once, and learn from how it went."""
        reservation = self._open.pop(end.ticket, None)
        assert reservation is not None, f"ticket {end.ticket} was given back before"
        member = reservation.member
        member.tokens -= reservation.tokens
        member.legs -= 1
        assert member.tokens >= 0, f"tokens of {member.name} below 0"
        assert member.legs >= 0, f"legs of {member.name} below 0"
        if end.outcome in _ANSWERED:
            member.heard_at = now
        if end.outcome == "ok":
            self._learn(reservation, end)
        if end.handoff_from:
            self._judge_handoff(end)
        if end.outcome in _SERVED:
            if member.breaker.opened or member.breaker.failures:
                member.breaker.leg_succeeded()
        elif end.blamed and (failure := end.failure) is not None:
            was_usable = member.usable
            member.leg_failed(failure, now)
            if was_usable and not member.usable and failure in ("unreachable", "broken"):
                # After 5xx and slow answers it only rests: what it works on for others may well succeed.
                self._refresh(member)
                self._lose_sessions(member)
                self._tell_loss(ReplicaLost(replica=member.name, instance=member.instance, silent=False))
            self._refresh(member)
        self._touch(member)
        return reservation

    # -- sessions ------------------------------------------------------------------------------------------

    def end_request(self, session: Session, now: float) -> None:
        self._unpin(self.sessions.end_request(session, now))

    def finish_session(self, session_id: str) -> None:
        self._unpin(self.sessions.finish(session_id))

    def expire_sessions(self, now: float) -> None:
        self._unpin(self.sessions.expire(now))

    def restore_sessions(self, records: Iterable[SessionRecord]) -> None:
        """The pins of an earlier router: taken over one by one, as probes find each replica in the same life."""
        for record in records:
            for pin in record.pins.values():
                self._restorable.setdefault(pin.replica, []).append((record, pin.instance))

    def views(self) -> list[ReplicaView]:
        return [_view(member) for member in self.members.values()]

    def _restore_pins(self, member: Member, now: float) -> None:
        for record, instance in self._restorable.pop(member.name, ()):
            same_life = instance == member.instance
            if same_life and self.sessions.restore(record.id, record.tokens, member, now):
                self._change_sessions(member, 1)

    def _learn(self, reservation: Reservation, end: LegEnd) -> None:
        member, session = reservation.member, reservation.session
        if member.role != "prefill":
            session.known_tokens, session.known_epoch = reservation.tokens, reservation.epoch
            return
        session.prefilled = True
        if end.seconds <= 0:
            return
        member.drain.add(reservation.ahead, end.seconds)
        rates = self._rates[member.role]
        if reservation.fresh:
            rates.cold.add(reservation.tokens, end.seconds)
        elif reservation.reason.startswith("moved") and end.cached_tokens:
            rates.pool.add(end.cached_tokens, end.seconds)

    def _judge_handoff(self, end: LegEnd) -> None:
        maker = self.members.get(end.handoff_from)
        if maker is not None and end.outcome == "ok":
            maker.handoffs_failed = 0
        elif maker is not None and end.blamed and end.outcome in _UNREAD:
            maker.handoffs_failed += 1

    def _refresh(self, member: Member, *, leave: bool = False) -> None:
        """Put a member into the index that it belongs to now, or into none."""
        usable = member.usable and not leave
        indexes = self._indexes[member.role]
        if member.index is not None and not usable:
            index = member.index
            index.discard(member)
            if not len(index):
                del indexes[index.epoch]
                self._epochs_changed()
        elif usable and member.index is None:
            assert member.epoch is not None, "usable without an epoch"
            if member.epoch not in indexes:
                indexes[member.epoch] = LoadIndex(member.epoch)
                self._epochs_changed()
            indexes[member.epoch].add(member)
        elif usable:
            self._touch(member)

    def _epochs_changed(self) -> None:
        """An index has come or gone."""
        decode = self._indexes["decode"]
        self.paired = sorted((epoch for epoch in self._indexes["prefill"] if epoch in decode), reverse=True)
        self.alone = sorted(self._indexes["colocated"], reverse=True)

    def _touch(self, member: Member) -> None:
        if member.index is not None:
            member.index.touch(member)

    def _lose_sessions(self, member: Member) -> None:
        self._change_sessions(member, -self.sessions.lose(member))

    def _unpin(self, ended: Iterable[Member]) -> None:
        for member in ended:
            self._change_sessions(member, -1)

    def _change_sessions(self, member: Member, by: int) -> None:
        member.sessions += by
        assert member.sessions >= 0, f"sessions of {member.name} below 0"
        self._touch(member)


def _view(member: Member) -> ReplicaView:
    return ReplicaView(
        name=member.name,
        role=member.role,
        url=member.url,
        instance=member.instance,
        epoch=member.epoch,
        usable=member.usable,
        draining=member.draining,
        breaker=member.breaker.state,
        active_sessions=member.sessions,
        legs_in_flight=member.legs,
        tokens_in_flight=member.tokens,
        handoffs_failed=member.handoffs_failed,
    )
