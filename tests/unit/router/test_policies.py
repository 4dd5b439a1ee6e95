from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from router.core.load import LoadIndex
from router.core.policies import ChoiceContext, Policy, make_policy
from router.core.policies.consistent_hash import ConsistentHashPolicy
from router.core.policies.least_loaded import LeastLoadedPolicy
from router.core.policies.power_of_two import PowerOfTwoPolicy
from router.core.policies.round_robin import RoundRobinPolicy
from router.core.policies.sticky_least_loaded import StickyLeastLoadedPolicy
from router.core.rates import MoveRates, Rate
from router.core.table import Member
from router.settings import ConsistentHash, LeastLoaded, PolicySettings, PowerOfTwo, RoundRobin, StickyLeastLoaded
from tests.unit.router.fleets import change, make_index

Choices = tuple[str, str] | None


def context(pinned: Member | None = None, *avoid: str, key: str = "s", **changes: Any) -> ChoiceContext:
    values: dict[str, Any] = {
        "prefix_tokens": 0, "moved_at": float("-inf"), "rates": MoveRates(cold=Rate(), pool=Rate()), "now": 0.0,
    }  # fmt: skip
    return ChoiceContext(key=key, pinned=pinned, avoid=frozenset(avoid), **values | changes)


def choose(policy: Policy, asked: ChoiceContext, *indexes: LoadIndex) -> Choices:
    choice = policy.choose(asked, indexes)
    return (choice.member.name, choice.reason) if choice is not None else None


def names(policy: Policy, index: LoadIndex, count: int, *avoid: str) -> list[str]:
    found = [choose(policy, context(None, *avoid, key=str(number)), index) for number in range(count)]
    return [each[0] for each in found if each is not None]


ALL: list[tuple[PolicySettings, type]] = [
    (StickyLeastLoaded(), StickyLeastLoadedPolicy),
    (RoundRobin(), RoundRobinPolicy),
    (LeastLoaded(), LeastLoadedPolicy),
    (ConsistentHash(), ConsistentHashPolicy),
    (PowerOfTwo(), PowerOfTwoPolicy),
]


@pytest.mark.parametrize(("settings", "kind"), ALL)
def test_the_type_names_the_policy(settings: PolicySettings, kind: type) -> None:
    assert isinstance(make_policy(settings), kind)


@pytest.mark.parametrize("settings", [settings for settings, _ in ALL])
def test_every_policy_keeps_to_who_has_room_and_takes_who_failed_before_nobody(settings: PolicySettings) -> None:
    policy = make_policy(settings)
    index, (a, b) = make_index("a", "b", max_legs=1)
    assert set(names(policy, index, 8, "a")) == {"b"}
    assert set(names(policy, index, 8, "a", "b")) <= {"a", "b"}
    change(b, legs=1)
    assert set(names(policy, index, 8, "a")) == {"a"}
    change(a, legs=1)
    assert names(policy, index, 1) == []
    assert policy.choose(context(), []) is None


@pytest.mark.parametrize("settings", [settings for settings, _ in ALL])
def test_every_policy_uses_all_epochs_that_will_do(settings: PolicySettings) -> None:
    policy = make_policy(settings)
    (new, (a,)), (old, (b,)) = make_index("a", max_legs=1), make_index("b", max_legs=1)
    change(a, legs=1)
    found = choose(policy, context(), new, old)
    assert found is not None
    assert found[0] == "b"
    change(a, legs=0)
    change(b, legs=1)
    found = choose(policy, context(), new, old)
    assert found is not None
    assert found[0] == "a"


# -- sticky least loaded -------------------------------------------------------------------------------------


def test_sticky_stays_while_its_replica_serves_and_says_why_it_leaves() -> None:
    index, (a, b) = make_index("a", "b", max_legs=9)
    policy = StickyLeastLoadedPolicy(None)
    for member in (a, b):
        member.epoch, member.alive = 1, True
    change(b, sessions=5)
    assert choose(policy, context(), index) == ("a", "new")
    assert choose(policy, context(b), index) == ("b", "pinned")
    assert choose(policy, context(b, "b"), index) == ("a", "moved_failed")
    change(b, legs=9)
    assert choose(policy, context(b), index) == ("a", "moved_full")
    b.alive = False
    index.discard(b)
    assert choose(policy, context(b), index) == ("a", "moved_lost")


def test_sticky_takes_an_avoided_replica_before_none() -> None:
    index, (a,) = make_index("a")
    assert choose(StickyLeastLoadedPolicy(None), context(a, "a"), index) == ("a", "pinned")
    index.discard(a)
    assert choose(StickyLeastLoadedPolicy(None), context(), index) is None


def test_sticky_goes_to_the_newest_epoch_among_equals_and_stays_in_an_older_one() -> None:
    (new, _), (old, (b,)) = make_index("a"), make_index("b")
    assert choose(StickyLeastLoadedPolicy(None), context(), new, old) == ("a", "new")
    assert choose(StickyLeastLoadedPolicy(None), context(b), new, old) == ("b", "pinned")


# -- the others ----------------------------------------------------------------------------------------------


def test_round_robin_ignores_sessions_and_keeps_its_place_while_others_come_and_go() -> None:
    index, (a, b, _c) = make_index("a", "b", "c")
    policy = RoundRobinPolicy()
    assert [choose(policy, context(a), index) for _ in range(2)] == [("a", "unpinned"), ("b", "unpinned")]
    assert names(policy, index, 2) == ["c", "a"]
    index.discard(b)
    assert names(policy, index, 2) == ["c", "a"]
    index.add(b)
    assert names(policy, index, 3) == ["b", "c", "a"]
    assert names(policy, index, 2, "b") == ["c", "a"]
    assert names(policy, index, 1, "a", "b", "c") == ["b"]


def test_least_loaded_looks_at_requests_and_not_at_the_session() -> None:
    index, (a, b) = make_index("a", "b")
    change(a, sessions=2)
    change(b, sessions=1)
    assert choose(LeastLoadedPolicy(), context(a), index) == ("b", "unpinned")


def hashed(index: LoadIndex, sessions: int = 600) -> dict[str, str]:
    policy, found = ConsistentHashPolicy(), {}
    for number in range(sessions):
        choice = policy.choose(context(key=f"session-{number}"), [index])
        assert choice is not None
        found[f"session-{number}"] = choice.member.name
    return found


def test_consistent_hash_moves_only_the_sessions_of_who_leaves_and_brings_them_back() -> None:
    index, members = make_index(*(f"decode-{number}" for number in range(6)))
    before = hashed(index)
    gone = members[2]
    index.discard(gone)
    without = hashed(index)
    moved = {key for key in before if before[key] != without[key]}
    assert moved == {key for key, name in before.items() if name == gone.name}
    index.add(gone)
    assert hashed(index) == before


def test_consistent_hash_gives_everyone_a_share() -> None:
    shares = Counter(hashed(make_index(*(f"decode-{number}" for number in range(6)))[0]).values())
    assert len(shares) == 6
    assert min(shares.values()) > 50
    assert max(shares.values()) < 200


def test_consistent_hash_agrees_between_routers_that_met_the_replicas_in_another_order() -> None:
    one, other = make_index("a", "b", "c")[0], make_index("c", "a", "b")[0]
    assert hashed(one, 100) == hashed(other, 100)


def test_power_of_two_is_nearly_even() -> None:
    index, members = make_index(*(f"decode-{number}" for number in range(8)))
    policy = PowerOfTwoPolicy()
    for _ in range(800):
        choice = policy.choose(context(), [index])
        assert choice is not None
        change(choice.member, legs=choice.member.legs + 1)
    legs = [member.legs for member in members]
    assert max(legs) - min(legs) <= 12


def test_power_of_two_takes_the_better_of_two() -> None:
    index, (a, b) = make_index("a", "b")
    change(a, legs=3)
    assert set(names(PowerOfTwoPolicy(), index, 20)) == {"b"}
    change(b, legs=3, tokens=9)
    assert set(names(PowerOfTwoPolicy(), index, 20)) == {"a"}


def test_power_of_two_repeats_itself() -> None:
    index = make_index(*"abcdefgh")[0]
    assert names(PowerOfTwoPolicy(), index, 50) == names(PowerOfTwoPolicy(), index, 50)
