"""Replicas, indexes and fleets of the usual shape, without any IO."""

from __future__ import annotations

from typing import Any

from router.core.asks import LegEnd, LegOutcome
from router.core.breaker import Breaker, BreakerRules
from router.core.fleet import Fleet, Reservation
from router.core.load import LoadIndex
from router.core.sessions import Session
from router.core.table import HealthRules, Member
from router.settings import EngineRole, RouterSettings

EPOCH = 1
BREAKER = BreakerRules(failures=2, open_s=1.0, max_open_s=30.0)


def make_settings(*, prefill: int = 0, decode: int = 0, colocated: int = 0, **changes: Any) -> RouterSettings:
    counts: dict[EngineRole, int] = {"prefill": prefill, "decode": decode, "colocated": colocated}
    engines = [
        {"name": f"{role}-{number}", "role": role, "url": f"http://{role}-{number}"}
        for role, count in counts.items()
        for number in range(count)
    ]
    values: dict[str, Any] = {
        "job": "test",
        "host": "127.0.0.1",
        "port": 0,
        "internal_host": "127.0.0.1",
        "internal_port": 0,
        "engines": engines,
        "handoff_lease_s": 30.0,
    }
    return RouterSettings.model_validate(values | changes)


def make_fleet(**arguments: Any) -> Fleet:
    """All replicas usable, in one epoch."""
    fleet = Fleet(make_settings(**arguments))
    for name in fleet.members:
        bring_up(fleet, name)
    return fleet


def bring_up(fleet: Fleet, name: str, epoch: int = EPOCH, now: float = 0.0) -> None:
    fleet.confirm(name, epoch)
    fleet.probe_passed(name, now)


def take_out(fleet: Fleet, name: str, now: float = 0.0) -> None:
    """As many failed probes as it takes."""
    while fleet.members[name].alive:
        fleet.probe_failed(name, "refused", now)


def epochs_of(fleet: Fleet, role: EngineRole) -> list[int]:
    """In which a replica of the role is usable, newest first."""
    epochs = {each.epoch for each in fleet.members.values() if each.epoch is not None}
    return sorted((each for each in epochs if fleet.is_served(role, each)), reverse=True)


def place(
    fleet: Fleet, session: Session, role: EngineRole = "decode", *, tokens: int = 1, now: float = 0.0, **changes: Any
) -> Reservation:
    made = fleet.place(session, role, epochs_of(fleet, role), tokens=tokens, now=now, **changes)
    assert made is not None, f"no {role} replica has room"
    return made


def end(fleet: Fleet, made: Reservation, outcome: LegOutcome = "ok", now: float = 0.0, **facts: Any) -> None:
    fleet.end_leg(LegEnd(ticket=made.ticket, outcome=outcome, **facts), now)


def fail_to_connect(fleet: Fleet, name: str, now: float = 0.0) -> None:
    """A leg there that met no engine, which opens the breaker at once."""
    role = fleet.members[name].role
    others = frozenset(fleet.members) - {name}
    session = fleet.sessions.begin_request(None)
    made = place(fleet, session, role, avoid=others, now=now)
    assert made.member.name == name
    end(fleet, made, "unreachable", now)
    fleet.end_request(session, now)


def is_idle(fleet: Fleet) -> bool:
    return all(view.legs_in_flight == view.tokens_in_flight == view.active_sessions == 0 for view in fleet.views())


def make_member(
    name: str, *, role: EngineRole = "decode", order: int = 1, instance: str = "", max_legs: int | None = None
) -> Member:
    rules = HealthRules(probe_failures=3, silence_limit_s=6.0, breaker=BREAKER, max_legs=max_legs)
    url, breaker = f"http://{name}", Breaker(BREAKER)
    return Member(name=name, role=role, url=url, instance=instance, order=order, rules=rules, breaker=breaker)


def make_index(*names: str, max_legs: int | None = None) -> tuple[LoadIndex, list[Member]]:
    index, members = LoadIndex(EPOCH), []
    for order, name in enumerate(names, start=1):
        members.append(make_member(name, order=order, max_legs=max_legs))
        index.add(members[-1])
    return index, members


def change(member: Member, **load: int) -> None:
    for what, value in load.items():
        setattr(member, what, value)
    assert member.index is not None
    member.index.touch(member)
