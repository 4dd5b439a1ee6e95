"""The cost of one choice in a large fleet, without any IO: the router's own `Fleet`, filled and asked.

`parts.py` asks for it. This is the one place of the benchmark that knows the inside of the router.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from router.core.asks import LegEnd
from router.core.fleet import Fleet
from router.settings import EngineEndpoint, RouterSettings

REPLICAS = 1_000
SESSIONS = 100_000
CHOICES = 2_000
TOKENS = 4_000
EPOCH = 1


@dataclass(frozen=True, kw_only=True)
class PickCost:
    """Per choice, its reservation included; one value per round."""

    new_session_us: Sequence[float]
    """The least loaded replica is looked for."""
    pinned_us: Sequence[float]
    """The session's replica is looked up."""


def measure_pick(rounds: int) -> PickCost:
    fleet = _filled_fleet()
    new, pinned = [], []
    for number in range(rounds):
        names = [f"new-{number}-{session}" for session in range(CHOICES)]
        new.append(_choose(fleet, names))
        for name in names:
            fleet.finish_session(name)
        pinned.append(_choose(fleet, [f"session-{session}" for session in range(CHOICES)]))
    return PickCost(new_session_us=new, pinned_us=pinned)


def _filled_fleet() -> Fleet:
    """Decode replicas of one epoch, with idle sessions spread over them."""
    engines = [
        EngineEndpoint(name=f"decode-{number}", role="decode", url=f"http://127.0.0.1:{10_000 + number}")
        for number in range(REPLICAS)
    ]
    fleet = Fleet(
        RouterSettings(
            job="bench",
            host="127.0.0.1",
            port=0,
            internal_host="127.0.0.1",
            internal_port=0,
            engines=tuple(engines),
            handoff_lease_s=30.0,
        )
    )
    for engine in engines:
        fleet.confirm(engine.name, EPOCH)
        fleet.probe_passed(engine.name, now=0.0)
    for number in range(SESSIONS):
        _choose(fleet, [f"session-{number}"])
    return fleet


def _choose(fleet: Fleet, names: Sequence[str]) -> float:
    """Microseconds of CPU for one choice; sessions begin before the clock starts, their legs end after it stops."""
    sessions = [fleet.sessions.begin_request(name) for name in names]
    began = time.thread_time()
    placed = [fleet.place(session, "decode", [EPOCH], tokens=TOKENS, now=1.0) for session in sessions]
    took = time.thread_time() - began
    for session, reservation in zip(sessions, placed, strict=True):
        assert reservation is not None
        fleet.end_leg(LegEnd(ticket=reservation.ticket, outcome="ok"), now=2.0)
        fleet.end_request(session, now=2.0)
    return took / len(names) * 1e6
