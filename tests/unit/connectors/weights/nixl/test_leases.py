"""When a version may be overwritten, and what a late reader is told."""

from __future__ import annotations

from connectors.weights.nixl.leases import Leases, Readers


def serving(version: str = "v1") -> Leases:
    leases = Leases(lease_s=10)
    leases.serve(version)
    return leases


def opened(leases: Leases, reader: str, now: float, version: str = "v1") -> str:
    lease = leases.open(reader, version, now)
    assert lease is not None
    return lease


def test_only_the_version_that_is_open_can_be_opened() -> None:
    leases = serving()
    assert leases.open("r", "v0", 0) is None
    leases.close(0)
    assert leases.open("r", "v1", 0) is None


def test_settled_when_all_expected_readers_have_confirmed() -> None:
    leases = serving()
    assert not leases.settled(2, now=0)
    first, second = opened(leases, "a", 0), opened(leases, "b", 0)
    assert leases.confirm(first, 1)
    assert not leases.settled(2, now=1)
    assert leases.confirm(second, 2)
    assert leases.settled(2, now=2)
    assert leases.close(2) == Readers(frozenset({"a", "b"}), frozenset())


def test_a_dead_reader_counts_when_its_lease_is_over_and_may_never_confirm() -> None:
    leases = serving()
    lease = opened(leases, "a", 0)
    assert leases.renew(lease, 9)
    assert leases.next_end() == 19
    assert not leases.settled(1, now=18.9)
    assert leases.settled(1, now=19)
    assert not leases.renew(lease, 19)
    assert not leases.confirm(lease, 19)
    assert leases.close(19) == Readers(frozenset(), frozenset({"a"}))


def test_nothing_is_confirmed_after_the_close_nor_under_the_next_version() -> None:
    leases = serving()
    lease = opened(leases, "a", 0)
    assert leases.close(1).lost == {"a"}
    assert not leases.confirm(lease, 1)
    leases.serve("v2")
    fresh = opened(leases, "a", 2, "v2")
    assert fresh != lease
    assert not leases.confirm(lease, 2)
    assert leases.confirm(fresh, 2)


def test_the_same_version_served_again_knows_no_lease_of_before() -> None:
    leases = serving()
    lease = opened(leases, "a", 0)
    leases.close(1)
    leases.serve("v1")
    assert not leases.confirm(lease, 1)


def test_a_reader_that_comes_again_begins_anew() -> None:
    leases = serving()
    first = opened(leases, "a", 0)
    second = opened(leases, "a", 1)
    assert not leases.confirm(first, 2)
    assert not leases.settled(1, now=2)
    assert leases.confirm(second, 2)
    assert leases.settled(1, now=2)
