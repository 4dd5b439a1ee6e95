"""A session leaves a replica that has room only where waiting there costs clearly more than moving."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from router.core.policies import ChoiceContext
from router.core.policies.sticky_least_loaded import StickyLeastLoadedPolicy
from router.core.rates import MoveRates, Rate
from router.settings import MoveRules
from tests.unit.router.fleets import bring_up, change, end, make_fleet, make_index, place

RULES = MoveRules(factor=2.0, min_gain_s=1.0, rest_s=30.0)
"""With a prefix of 1,000 tokens at 1,000 tokens/s elsewhere, waiting must cost more than 1 s * 2 + 1 s."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pinned replica with a queue, one other, and what is known about both."""

    waits_tokens: int = 5000
    drain: float | None = 1000.0
    there_tokens: int = 0
    there_drain: float | None = 1000.0
    cold: float | None = 1000.0
    pool: float | None = None
    since_moved_s: float = float("inf")
    rules: MoveRules | None = RULES
    moves: bool


@pytest.mark.parametrize(
    "case",
    [
        Case(moves=True),
        Case(waits_tokens=3001, moves=True),
        Case(waits_tokens=3000, moves=False),
        Case(waits_tokens=0, moves=False),
        Case(drain=None, moves=False),
        Case(cold=None, moves=False),
        Case(pool=100.0, moves=False),
        Case(cold=None, pool=1000.0, moves=True),
        Case(there_tokens=900, moves=True),
        Case(there_tokens=1000, moves=False),
        Case(there_tokens=1, there_drain=None, moves=False),
        Case(since_moved_s=29.9, moves=False),
        Case(since_moved_s=30.0, moves=True),
        Case(rules=None, moves=False),
        Case(rules=MoveRules(factor=2.0, min_gain_s=6.0, rest_s=0.0), moves=False),
        Case(rules=MoveRules(factor=6.0, min_gain_s=0.0, rest_s=0.0), moves=False),
        Case(rules=MoveRules(factor=4.9, min_gain_s=0.0, rest_s=0.0), moves=True),
    ],
    ids=str,
)
def test_moves(case: Case) -> None:
    index, (pinned, other) = make_index("pinned", "other")
    change(pinned, tokens=case.waits_tokens)
    change(other, tokens=case.there_tokens)
    pinned.drain, other.drain = Rate(case.drain), Rate(case.there_drain)
    choice = StickyLeastLoadedPolicy(case.rules).choose(
        ChoiceContext(
            key="s",
            pinned=pinned,
            avoid=frozenset(),
            prefix_tokens=1000,
            moved_at=100.0 - case.since_moved_s,
            rates=MoveRates(cold=Rate(case.cold), pool=Rate(case.pool)),
            now=100.0,
        ),
        [index],
    )
    assert choice is not None
    assert (choice.member, choice.reason) == ((other, "moved_wait") if case.moves else (pinned, "pinned"))


def test_where_there_is_no_other_it_stays() -> None:
    index, (pinned,) = make_index("pinned")
    change(pinned, tokens=10**6)
    pinned.drain = Rate(1.0)
    rates = MoveRates(cold=Rate(1.0), pool=Rate())
    context = ChoiceContext(
        key="s", pinned=pinned, avoid=frozenset(), prefix_tokens=1, moved_at=float("-inf"), rates=rates, now=0.0
    )
    choice = StickyLeastLoadedPolicy(RULES).choose(context, [index])
    assert choice is not None
    assert (choice.member, choice.reason) == (pinned, "pinned")


def test_rates_are_measured_on_legs_and_a_moved_session_rests_where_it_went() -> None:
    fleet = make_fleet(prefill=2)
    first = fleet.sessions.begin_request("s")
    end(fleet, place(fleet, first, "prefill", tokens=1000), now=1.0, seconds=1.0)
    assert first.prefill is not None
    first.known_tokens = 1000
    queue = first.prefill

    def blocked(tokens: int) -> None:
        one = fleet.sessions.begin_request(None)
        others = frozenset(fleet.members) - {queue.name}
        assert place(fleet, one, "prefill", tokens=tokens, avoid=others).member is queue

    blocked(3000)
    assert place(fleet, first, "prefill", tokens=1000, now=2.0).reason == "pinned"
    blocked(3000)
    moved = place(fleet, first, "prefill", tokens=1000, now=3.0)
    assert moved.reason == "moved_wait"
    assert moved.member is not queue

    queue = moved.member
    blocked(10**6)
    assert place(fleet, first, "prefill", tokens=1000, now=4.0).member is moved.member
    end(fleet, moved, now=5.0, seconds=1.0)
    assert place(fleet, first, "prefill", tokens=1000, now=40.0).reason == "moved_wait"


def test_what_a_moved_session_read_from_the_pool_sets_the_price_of_the_next_move() -> None:
    fleet = make_fleet(prefill=2, policy={"type": "sticky_least_loaded"})
    session = fleet.sessions.begin_request("s")
    end(fleet, place(fleet, session, "prefill", tokens=1000), seconds=0.01)
    session.known_tokens = 1000
    assert session.prefill is not None
    fleet.drain(session.prefill.name)
    moved = place(fleet, session, "prefill", tokens=1000)
    assert moved.reason == "moved_lost"
    end(fleet, moved, seconds=100.0, cached_tokens=1000)
    bring_up(fleet, "prefill-0")
    fleet.drain("prefill-0", False)
    blocker = fleet.sessions.begin_request(None)
    others = frozenset(fleet.members) - {moved.member.name}
    place(fleet, blocker, "prefill", tokens=10_000, avoid=others)
    moved.member.drain = Rate(100.0)
    assert place(fleet, session, "prefill", tokens=1000, now=100.0).reason == "pinned"
