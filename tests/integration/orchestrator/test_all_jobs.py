"""What a control plane does for all jobs unasked, on threads and a real record."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from orchestrator import all_jobs
from orchestrator.all_jobs import AllJobs
from orchestrator.store.records import ENDED
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import serving, supervised, until


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return serving(FakeFleet(tmp_path))


class SteppedClock:
    """In place of `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def generation(fleet: FakeFleet) -> int:
    with fleet.database.reading() as connection:
        return int(connection.execute("SELECT generation FROM weight_positions").fetchone()[0])


def is_tried() -> bool:
    return any(thread.name == "keep demo" for thread in threading.enumerate())


@pytest.mark.parametrize("change", ["UPDATE jobs SET plan = '{}'", "UPDATE weight_positions SET position = '{}'"])
def test_a_job_that_another_version_recorded_is_tried_now_and_then_and_told_of_once(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    with fleet.database.transaction() as connection:
        connection.execute(change)
    clock, get, tries, before = SteppedClock(), fleet.store.get, list[str](), generation(fleet)
    monkeypatch.setattr(all_jobs, "time", clock)
    monkeypatch.setattr(fleet.store, "get", lambda name: tries.append(name) or get(name))
    jobs = AllJobs(fleet.service(), threading.Event())
    for second in range(1000):
        clock.now = float(second)
        jobs.look(clock.now)
        until(lambda: not is_tried())
    # Pauses double up to a minute.
    assert 20 < len(tries) < 40
    assert caplog.text.count("was recorded by another version of Headrace") == 1
    assert generation(fleet) == before


def test_another_phase_of_a_job_begins_without_a_pause(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet.database.transaction() as connection:
        connection.execute("UPDATE jobs SET plan = '{}'")
    clock = SteppedClock()
    monkeypatch.setattr(all_jobs, "time", clock)
    jobs = AllJobs(fleet.service(), threading.Event())
    for clock.now in range(100):
        jobs.look(clock.now)
        until(lambda: not is_tried())
    fleet.service().begin_stop("demo")
    for _ in range(2):
        jobs.look(clock.now)
    until(lambda: fleet.store.get("demo").phase == "stopped")
    until(lambda: not is_tried())


def test_a_start_that_is_left_while_others_are_kept_goes_on(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path)
    with supervised(fleet):
        fleet.record()
        until(lambda: fleet.store.get("demo").phase == "ready")


def test_what_could_not_be_ended_is_ended_once_it_can_be(fleet: FakeFleet, quick: None) -> None:
    """The supervision of a job that has failed leaves its stop half way."""
    fleet.machine.undying = {"decode-0"}
    fleet.machine.on_start = lambda started: fleet.machine.kill(started) if started == "router" else None
    with supervised(fleet):
        fleet.machine.kill("router")
        until(lambda: "could not be ended" in fleet.store.get("demo").reason)
        fleet.machine.undying = set()
        until(lambda: fleet.store.get("demo").phase in ENDED)
    assert fleet.machine.living == {}
    assert "router ended 3 times" in fleet.store.get("demo").reason
    events = fleet.store.events.since(0, 1000, "demo")
    assert sum("its stop goes on" in each.event.text for each in events) == 1
