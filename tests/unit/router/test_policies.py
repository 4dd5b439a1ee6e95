from __future__ import annotations

from router.core.load import LoadIndex
from router.core.policies import ChoiceContext, make_policy
from router.core.policies.round_robin import RoundRobinPolicy
from router.core.policies.sticky_least_loaded import StickyLeastLoadedPolicy
from router.settings import RoundRobin, StickyLeastLoaded


def context(pinned: str | None = None, *avoid: str) -> ChoiceContext:
    return ChoiceContext(pinned=pinned, avoid=frozenset(avoid))


def make_index(*names: str) -> LoadIndex:
    index = LoadIndex(names)
    for name in names:
        index.set_present(name, True)
    return index


def test_sticky_stays_while_its_replica_serves() -> None:
    index, policy = make_index("a", "b"), StickyLeastLoadedPolicy()
    index.change("b", sessions=5)
    assert policy.choose(context("b"), index) == "b"
    assert policy.choose(context("b", "b"), index) == "a"
    index.set_present("b", False)
    assert policy.choose(context("b"), index) == "a"


def test_sticky_takes_an_avoided_replica_before_none() -> None:
    index, policy = make_index("a"), StickyLeastLoadedPolicy()
    assert policy.choose(context("a", "a"), index) == "a"
    index.set_present("a", False)
    assert policy.choose(context(), index) is None


def test_round_robin_ignores_sessions_and_keeps_its_place() -> None:
    index, policy = make_index("a", "b", "c"), RoundRobinPolicy()
    assert [policy.choose(context("a"), index) for _ in range(4)] == ["a", "b", "c", "a"]
    index.set_present("b", False)
    assert [policy.choose(context(), index) for _ in range(2)] == ["c", "a"]
    index.set_present("b", True)
    assert [policy.choose(context(None, "b"), index) for _ in range(2)] == ["c", "a"]
    assert policy.choose(context(None, "a", "b", "c"), index) == "b"
    for name in ("a", "b", "c"):
        index.set_present(name, False)
    assert policy.choose(context(), index) is None


def test_the_type_names_the_policy() -> None:
    assert isinstance(make_policy(StickyLeastLoaded()), StickyLeastLoadedPolicy)
    assert isinstance(make_policy(RoundRobin()), RoundRobinPolicy)
