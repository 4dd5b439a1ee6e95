"""The journal's texts: one newest record per run, written by the newest coordinator alone, and what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import UpdateRefused
from orchestrator.store.database import Database
from orchestrator.store.records import Phase
from orchestrator.store.updates import (
    REMARKS_KEPT,
    CoordinatorReplaced,
    EndedUpdate,
    StoredRemark,
    UpdateStore,
)
from tests.fakes.fake_launch import NOW, FakeFleet

RUN = "run-1"
COMMITTED = EndedUpdate(number=1, outcome="committed", why="", at=NOW + 5)


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    """With a job that serves."""
    fleet = FakeFleet(tmp_path)
    fleet.record(run_id=RUN)
    fleet.store.set_phase("demo", RUN, "ready", "", NOW)
    return fleet


@pytest.fixture
def updates(fleet: FakeFleet) -> UpdateStore:
    return fleet.updates


def test_a_record_is_on_the_disk_before_it_returns(tmp_path: Path) -> None:
    with Database(tmp_path).transaction() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_the_newest_record_is_what_is_read(updates: UpdateStore) -> None:
    assert updates.position("demo") == ""
    generation = updates.take_over("demo", RUN)
    for text in ("one", "two"):
        updates.record("demo", RUN, generation, text, None)
    assert updates.position("demo") == "two"


def test_a_coordinator_that_was_overtaken_records_nothing(updates: UpdateStore) -> None:
    older = updates.take_over("demo", RUN)
    updates.record("demo", RUN, older, "one", None)
    newer = updates.take_over("demo", RUN)
    assert newer > older
    with pytest.raises(CoordinatorReplaced, match="another coordinator"):
        updates.record("demo", RUN, older, "two", None)
    assert updates.position("demo") == "one"
    updates.record("demo", RUN, newer, "three", None)


def test_a_coordinator_of_another_run_does_not_begin(updates: UpdateStore) -> None:
    for job, run_id in (("demo", "run-0"), ("nobody", RUN)):
        with pytest.raises(CoordinatorReplaced, match="another run"):
            updates.take_over(job, run_id)


def test_an_update_ends_with_its_record_and_only_once(updates: UpdateStore) -> None:
    generation = updates.take_over("demo", RUN)
    assert updates.ask("demo", RUN, "first", NOW) == 1
    updates.record("demo", RUN, generation, "one", COMMITTED)
    updates.record("demo", RUN, generation, "two", EndedUpdate(number=1, outcome="fenced", why="late", at=NOW + 9))
    (update,) = updates.updates("demo", 9)
    assert (update.request, update.outcome, update.why, update.ended_at) == ("first", "committed", "", NOW + 5)


def test_one_update_at_a_time(updates: UpdateStore) -> None:
    generation = updates.take_over("demo", RUN)
    updates.ask("demo", RUN, "first", NOW)
    with pytest.raises(UpdateRefused, match="update 1 of job 'demo' is under way"):
        updates.ask("demo", RUN, "second", NOW)
    updates.end("demo", RUN, generation, EndedUpdate(number=1, outcome="refused", why="no", at=NOW))
    assert updates.ask("demo", RUN, "second", NOW) == 2


@pytest.mark.parametrize("phase", ["stopping", "stopped", "failed"])
def test_a_run_that_does_not_serve_any_more_is_asked_for_nothing(
    fleet: FakeFleet, updates: UpdateStore, phase: Phase
) -> None:
    fleet.store.set_phase("demo", RUN, phase, "", NOW)
    for job, run_id in (("demo", RUN), ("demo", "run-0"), ("nobody", RUN)):
        with pytest.raises(UpdateRefused, match=f"job '{job}' does not serve any more, or is in another run"):
            updates.ask(job, run_id, "first", NOW)
    assert updates.updates("demo", 9) == []


def test_one_update_is_found_by_its_number_or_as_the_newest(updates: UpdateStore) -> None:
    assert (updates.newest("demo"), updates.update("demo", 1)) == (None, None)
    generation = updates.take_over("demo", RUN)
    updates.ask("demo", RUN, "first", NOW)
    updates.end("demo", RUN, generation, COMMITTED)
    updates.ask("demo", RUN, "second", NOW)
    first, second = updates.updates("demo", 9)
    assert (updates.newest("demo"), updates.update("demo", 2), updates.update("demo", 1)) == (second, second, first)
    assert [updates.update("demo", number) for number in (-1, 0, 3, 10**30)] == [None] * 4
    assert updates.updates("demo", 1) == [second]


def test_a_coordinator_that_was_overtaken_ends_no_update(updates: UpdateStore) -> None:
    older = updates.take_over("demo", RUN)
    updates.ask("demo", RUN, "first", NOW)
    updates.take_over("demo", RUN)
    with pytest.raises(CoordinatorReplaced, match="another coordinator"):
        updates.end("demo", RUN, older, EndedUpdate(number=1, outcome="refused", why="no", at=NOW))
    assert [each.outcome for each in updates.updates("demo", 9)] == [""]


def test_an_update_is_cancelled_until_it_has_ended(updates: UpdateStore) -> None:
    generation = updates.take_over("demo", RUN)
    updates.ask("demo", RUN, "first", NOW)
    for _ in range(2):
        updates.cancel("demo", 1)
    assert [each.is_cancelled for each in updates.updates("demo", 9)] == [True]
    updates.end("demo", RUN, generation, COMMITTED)
    updates.ask("demo", RUN, "second", NOW)
    updates.end("demo", RUN, generation, EndedUpdate(number=2, outcome="committed", why="", at=NOW))
    updates.cancel("demo", 2)
    assert [each.is_cancelled for each in updates.updates("demo", 9)] == [True, False]


def test_the_newest_remarks_are_kept(updates: UpdateStore) -> None:
    for number in range(REMARKS_KEPT + 2):
        updates.remark("demo", StoredRemark(text=str(number), at=NOW + number))
    found = updates.remarks("demo")
    assert [each.text for each in found] == [str(number) for number in range(2, REMARKS_KEPT + 2)]
    assert (found[0].at, updates.remarks("other")) == (NOW + 2, [])


def test_a_new_run_begins_without_records(fleet: FakeFleet, updates: UpdateStore) -> None:
    generation = updates.take_over("demo", RUN)
    updates.record("demo", RUN, generation, "one", None)
    updates.ask("demo", RUN, "first", NOW)
    assert fleet.store.set_phase("demo", RUN, "stopped", "", NOW)
    fleet.record(run_id="run-2", now=NOW + 1)
    assert (updates.position("demo"), updates.updates("demo", 9)) == ("", [])
    with pytest.raises(CoordinatorReplaced):
        updates.record("demo", RUN, generation, "late", None)


@pytest.mark.parametrize("phase", ["stopped", "failed"])
def test_what_is_open_ends_with_its_run(fleet: FakeFleet, updates: UpdateStore, phase: Phase) -> None:
    generation = updates.take_over("demo", RUN)
    for text in ("first", "second"):
        number = updates.ask("demo", RUN, text, NOW)
        updates.record("demo", RUN, generation, text, COMMITTED, begun=number)
    fleet.store.set_phase("demo", RUN, "stopping", "", NOW + 7)
    assert updates.newest_of_outcome("", "demo", 10) != []
    fleet.store.set_phase("demo", RUN, phase, "", NOW + 8)
    updates.record("demo", RUN, generation, "late", EndedUpdate(number=2, outcome="committed", why="", at=NOW + 9))
    ends = [(each.outcome, each.why, each.ended_at) for each in updates.updates("demo", 9)]
    assert ends == [("committed", "", NOW + 5), ("cancelled", f"the job has {phase}", NOW + 8)]
    told = [(each.event.kind, each.event.data.get("outcome")) for each in updates.events.newest(2)]
    assert told == [("update_ended", "cancelled"), ("job_phase", None)]


def test_when_an_update_was_begun_and_how_updates_ended(updates: UpdateStore) -> None:
    number = updates.ask("demo", RUN, "{}", NOW)
    generation = updates.take_over("demo", RUN)
    assert [each.number for each in updates.newest_of_outcome("", "demo", 10)] == [number]
    updates.record("demo", RUN, generation, "one", None, begun=number)
    begun = updates.update("demo", number)
    assert begun is not None
    assert begun.begun_at is not None
    updates.record("demo", RUN, generation, "two", COMMITTED, begun=number)
    after = updates.update("demo", number)
    assert after is not None
    assert (after.job, after.run_id, after.begun_at) == ("demo", RUN, begun.begun_at)
    assert updates.newest_of_outcome("", None, 10) == []
    assert [each.number for each in updates.newest_of_outcome("committed", None, 10)] == [number]
