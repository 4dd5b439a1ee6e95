from __future__ import annotations

import pytest

from router.core.table import HealthRules, LegFailure, Replica, ReplicaTable


def make_table() -> ReplicaTable:
    rules = HealthRules(probe_failures=3, leg_failures=2, busy_window_s=6.0)
    table = ReplicaTable([Replica(name="a", role="decode", url="http://a")], rules)
    assert table.probe_passed("a")
    return table


def test_nothing_is_usable_before_its_first_good_probe() -> None:
    table = ReplicaTable(
        [Replica(name="a", role="decode", url="http://a")],
        HealthRules(probe_failures=1, leg_failures=1, busy_window_s=1.0),
    )
    assert not table.is_usable("a")
    assert table.probe_passed("a")
    assert not table.probe_passed("a")
    assert table.is_usable("a")


def test_probes_take_out_at_the_threshold_and_one_brings_back() -> None:
    table = make_table()
    assert [table.probe_failed("a", "refused", 0.0) for _ in range(4)] == [False, False, True, False]
    assert not table.is_usable("a")
    assert table.probe_passed("a")


def test_a_good_probe_forgets_the_bad_ones() -> None:
    table = make_table()
    for _ in range(3):
        assert not table.probe_failed("a", "refused", 0.0)
        assert not table.probe_failed("a", "slow", 0.0)
        table.probe_passed("a")
    assert table.is_usable("a")


def test_a15_slow_probes_do_not_judge_a_replica_that_sends() -> None:
    table = make_table()
    table.byte_seen("a", 10.0)
    assert [table.probe_failed("a", "slow", 16.0) for _ in range(5)] == [False] * 5
    assert [table.probe_failed("a", "slow", 16.1) for _ in range(3)] == [False, False, True]


def test_a15_a_refused_probe_counts_also_for_a_replica_that_sent() -> None:
    table = make_table()
    table.byte_seen("a", 10.0)
    assert [table.probe_failed("a", "refused", 10.0) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("failure", ["broken", "timeout", "engine_error"])
def test_failed_legs_in_a_row_take_out(failure: LegFailure) -> None:
    table = make_table()
    assert not table.leg_failed("a", failure)
    table.leg_succeeded("a")
    assert not table.leg_failed("a", failure)
    assert table.leg_failed("a", failure)
    assert not table.is_usable("a")


def test_a_replica_without_a_connection_is_out_at_once() -> None:
    table = make_table()
    assert table.leg_failed("a", "unreachable")
    assert not table.leg_failed("a", "unreachable")
