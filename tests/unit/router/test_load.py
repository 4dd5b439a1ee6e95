from __future__ import annotations

from router.core.load import LoadIndex
from tests.unit.router.fleets import change, make_index, make_member


def best(index: LoadIndex, *avoid: str) -> str | None:
    member = index.least_loaded(frozenset(avoid))
    return member.name if member is not None else None


def test_the_order_is_sessions_then_tokens_then_the_least_recent_choice() -> None:
    index, (a, b, c) = make_index("a", "b", "c")
    assert best(index) == "a"
    change(a, chosen=1)
    assert best(index) == "b"
    change(b, tokens=1)
    assert best(index) == "c"
    change(c, sessions=1)
    assert best(index) == "a"
    change(a, tokens=2)
    assert best(index) == "b"
    change(c, sessions=0)
    assert best(index) == "c"


def test_what_is_avoided_or_gone_is_not_found_and_not_forgotten() -> None:
    index, (a, _b) = make_index("a", "b")
    assert best(index, "a") == "b"
    assert best(index, "a", "b") is None
    assert best(index) == "a"
    index.discard(a)
    assert (best(index), len(index)) == ("b", 1)
    a.legs = 1
    index.add(a)
    assert (best(index), len(index), a.legs) == ("a", 2, 1)


def test_a_full_replica_is_counted_and_not_chosen() -> None:
    index, (a, b) = make_index("a", "b", max_legs=1)
    change(a, legs=1)
    assert (best(index), len(index), index.in_order()) == ("b", 2, [b])
    change(b, legs=1)
    assert (best(index), len(index), index.in_order()) == (None, 2, [])
    change(a, legs=0)
    assert (best(index), index.in_order()) == ("a", [a])


def test_a_replica_that_went_to_another_epoch_is_no_longer_found_in_its_old_one() -> None:
    old, (a, b) = make_index("a", "b")
    new = LoadIndex(2)
    old.discard(a)
    new.add(a)
    assert (best(old), best(new)) == ("b", "a")
    old.discard(b)
    assert (best(old), old.in_order(), len(old)) == (None, [], 0)


def test_members_are_listed_in_the_order_of_their_joining() -> None:
    index, members = LoadIndex(1), [make_member("a", order=3), make_member("b", order=1), make_member("c", order=2)]
    for member in members:
        index.add(member)
    assert [member.name for member in index.in_order()] == ["b", "c", "a"]


def test_the_index_stays_small_while_its_top_is_still() -> None:
    index, members = make_index(*(f"r{number}" for number in range(10)))
    for _ in range(5000):
        change(members[3], sessions=1)
        change(members[3], sessions=0)
    assert len(index._heap) <= 64 + 4 * 10
    assert best(index) == "r0"
