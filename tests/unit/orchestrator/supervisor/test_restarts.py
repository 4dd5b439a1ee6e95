"""Rows of ends: pauses, budgets, first causes; and what a job can live without."""

from __future__ import annotations

import pytest

from orchestrator.plan.kinds import UnitKind
from orchestrator.store.keeping import UnitEnd
from orchestrator.supervisor.restarts import POLICIES, Row, job_failure, row_of

KINDS: dict[str, UnitKind] = {
    "mooncake-master": "master",
    "storage-prefill-0": "storage",
    "prefill-0": "engine",
    "router": "router",
    "prometheus": "monitoring",
}


def end(at: float, ready_s: float = 0.0, cause: str = "it broke") -> UnitEnd:
    return UnitEnd(at=at, ready_s=ready_s, cause=cause)


def crash_loop(kind: UnitKind) -> tuple[list[float], Row]:
    """Each life ends as soon as it may begin, until none may. The pauses, and the row then."""
    now, ends, pauses = 1_000.0, [end(1_000.0, cause="the first")], []
    while not (row := row_of(kind, ends)).is_spent:
        pauses.append(max(0.0, row.may_start_at - now))
        now += pauses[-1]
        ends.append(end(now, cause="a later one"))
    return pauses, row


@pytest.mark.parametrize("kind", POLICIES)
def test_a_crash_loop_is_over_after_its_budget_and_the_first_cause_is_told(kind: UnitKind) -> None:
    policy = POLICIES[kind]
    pauses, row = crash_loop(kind)
    assert len(pauses) == policy.budget - 1
    assert pauses[:3] == [0.0, policy.first_pause_s, 2 * policy.first_pause_s]
    assert max(pauses) <= policy.longest_pause_s
    assert str(row) == f"ended {policy.budget} times within {sum(pauses):.0f} s, at first: the first"


def test_one_that_never_ended_may_start_at_once() -> None:
    row = row_of("engine", [])
    assert (row.may_start_at, row.is_spent, row.first_cause, str(row)) == (0.0, False, "", "")


@pytest.mark.parametrize("kind", POLICIES)
def test_what_is_killed_now_and_then_is_always_started_again(kind: UnitKind) -> None:
    steady_s = POLICIES[kind].steady_s
    row = row_of(kind, [end(100.0 * number, ready_s=steady_s, cause=f"kill {number}") for number in range(30)])
    assert (row.may_start_at, row.is_spent, str(row)) == (0.0, False, "kill 29")


def test_a_steady_life_ends_a_row_and_its_own_end_begins_the_next() -> None:
    row = row_of("engine", [end(0.0), end(1.0), end(500.0, ready_s=400.0, cause="out of memory"), end(510.0)])
    assert str(row) == "ended 2 times within 10 s, at first: out of memory"
    assert row.may_start_at == 511.0


@pytest.mark.parametrize(
    ("given_up", "can_serve", "fails"),
    [
        ([], True, []),
        (["prometheus"], True, []),
        (["mooncake-master", "storage-prefill-0", "prometheus"], True, []),
        (["prefill-0"], True, []),
        (["prefill-0", "mooncake-master"], False, ["prefill-0"]),
        (["router"], True, ["router"]),
    ],
)
def test_what_a_job_lives_on_without(given_up: list[str], can_serve: bool, fails: list[str]) -> None:
    rows = {name: row_of(KINDS[name], [end(0.0, cause=f"{name} broke")]) for name in given_up}
    failure = job_failure(KINDS, rows, can_serve=can_serve)
    assert failure == "; ".join(f"{name} {name} broke" for name in fails)
