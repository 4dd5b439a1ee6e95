"""Pauses between restarts of a process that ends again and again."""

from __future__ import annotations

from orchestrator.supervisor.restarts import LONGEST_PAUSE_S, may_start_at


def test_the_first_restart_is_made_at_once() -> None:
    assert may_start_at([]) <= 0


def test_pauses_double_up_to_a_limit() -> None:
    times: list[float] = []
    now, pauses = 100.0, []
    for _ in range(12):
        times.append(now)
        pauses.append(may_start_at(times) - now)
        now = may_start_at(times)
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_process_that_ran_long_is_not_blamed_for_old_restarts() -> None:
    assert may_start_at([0.0, 1.0, 2.0, 50_000.0]) == 50_001.0
