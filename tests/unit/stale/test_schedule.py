"""Schedules of `make check-stale`: the same for the same seed, and together of every kind."""

from __future__ import annotations

from typing import get_args

from tests.stale.schedule import BLOCK, FaultKind, InFlight, Schedule, Strategy, make_schedule

ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LONGEST = 1024


def schedule(seed: int) -> Schedule:
    return make_schedule(seed, ENGINES, "storage")


ALL = [schedule(seed) for seed in range(1, 51)]


def test_a_seed_makes_one_schedule() -> None:
    assert schedule(3) == ALL[2]
    assert schedule(3) != schedule(4)


def test_fifty_schedules_have_every_kind_of_update_and_fault() -> None:
    rounds = [each for schedule in ALL for each in schedule.rounds]
    updates = [each.update for each in rounds if each.update is not None]
    kinds = {(update.strategy, update.in_flight) for update in updates}
    assert kinds == {(strategy, mode) for strategy in get_args(Strategy) for mode in get_args(InFlight)}
    assert any(update.fails_first for update in updates)
    assert any(update.stalls for update in updates)
    assert {each.fault.kind for each in rounds if each.fault is not None} == set(get_args(FaultKind))


def test_every_schedule_has_turns_before_and_after_each_update() -> None:
    for each in ALL:
        assert [round_.update is not None for round_ in each.rounds] == [False, True, False, True, False]
        assert all(round_.asks for round_ in each.rounds)


def test_conversations_fit_into_the_engines() -> None:
    for each in ALL:
        lengths: dict[str, int] = {}
        for ask in (ask for round_ in each.rounds for ask in round_.asks):
            lengths[ask.talk] = lengths.get(ask.talk, 0) + len(ask.new_part) + ask.completion
        assert BLOCK < max(lengths.values()) < LONGEST
