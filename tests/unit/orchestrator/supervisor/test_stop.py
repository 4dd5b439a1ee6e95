"""The end of a job: in reverse order, completely, and as often as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import JobUnknown
from orchestrator.store.database import Database
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import StoredJob
from orchestrator.supervisor.stop import StopIncomplete, record_stop, stop_job
from tests.fakes.fake_launch import NOW, FakeFleet, stages


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def stop(fleet: FakeFleet) -> StoredJob:
    return stop_job(fleet.store, fleet.backend(), "demo")


def test_ends_stage_by_stage_in_reverse_and_sweeps_last(fleet: FakeFleet) -> None:
    job = fleet.running()
    job.socket_dir.mkdir()
    stray = fleet.machine.run(job.run_id, "started and never recorded")
    foreign = fleet.machine.run("another run", "prefill-0")
    sweeps = fleet.machine.sweeps
    said: list[str] = []
    done = stop_job(fleet.store, fleet.backend(), "demo", say=said.append)
    assert done.phase == "stopped"
    assert fleet.machine.stopped == list(reversed(stages(job.plan)))
    assert fleet.machine.sweeps == sweeps + 1
    assert stray not in fleet.machine.living
    assert list(fleet.machine.living) == [foreign]
    assert not job.socket_dir.exists()
    assert said == [f"stopping {', '.join(stage)}" for stage in fleet.machine.stopped]


def test_the_stop_is_recorded_before_anything_is_ended(fleet: FakeFleet) -> None:
    fleet.running()
    phases: list[str] = []
    stop_job(fleet.store, fleet.backend(), "demo", say=lambda _text: phases.append(fleet.store.get("demo").phase))
    assert set(phases) == {"stopping"}


def test_a_second_stop_does_nothing(fleet: FakeFleet) -> None:
    fleet.running()
    first = stop(fleet)
    stops = len(fleet.machine.stopped)
    assert stop(fleet) == first
    assert len(fleet.machine.stopped) == stops


def test_only_what_was_started_is_stopped(fleet: FakeFleet) -> None:
    fleet.machine.on_start = lambda name: fleet.machine.kill(name)
    job = fleet.record()
    record = fleet.backend().start(job.run, job.plan.units[0])
    fleet.store.add_unit("demo", job.run_id, record, NOW)
    assert stop(fleet).phase == "stopped"
    assert fleet.machine.stopped == [(job.plan.units[0].name,)]


def test_what_another_version_planned_is_ended_all_the_same(fleet: FakeFleet) -> None:
    job = fleet.running()
    with Database(fleet.home).transaction() as connection:
        connection.execute("UPDATE jobs SET plan = '{}'")
    assert stop(fleet).phase == "stopped"
    assert not fleet.machine.living
    assert set(fleet.machine.stopped[-1]) == {record.name for record in job.records}


def test_a_job_that_failed_stays_failed(fleet: FakeFleet) -> None:
    fleet.running()
    failed = stop_job(fleet.store, fleet.backend(), "demo", end_phase="failed", reason="decode-0 ended")
    assert (failed.phase, failed.reason) == ("failed", "decode-0 ended")
    assert stop(fleet) == failed


def test_leftovers_of_an_ended_job_are_ended(fleet: FakeFleet) -> None:
    job = fleet.running()
    assert fleet.store.set_phase("demo", job.run_id, "failed", "why", NOW)
    done = stop(fleet)
    assert (done.phase, done.reason) == ("failed", "why")
    assert fleet.machine.living == {}


def test_processes_that_do_not_end_are_named_and_the_stop_can_be_tried_again(fleet: FakeFleet) -> None:
    job = fleet.running()
    fleet.machine.undying = {"decode-0"}
    pid = next(unit.record.pid for unit in job.units if unit.record.name == "decode-0")
    with pytest.raises(StopIncomplete, match=rf"could not be ended: {pid}; .*ps -fp {pid}"):
        stop(fleet)
    assert fleet.machine.names() == ["decode-0"]
    assert fleet.store.get("demo").phase == "stopping"
    fleet.machine.undying = set()
    assert stop(fleet).phase == "stopped"


def test_what_cannot_be_recorded_is_ended_all_the_same(fleet: FakeFleet) -> None:
    job = fleet.running()
    fleet.machine.run(job.run_id, "started and never recorded")
    fleet.database.is_full = True
    with pytest.raises(StopIncomplete, match=r"all .* have ended, and its record still says 'ready': .*make room"):
        stop(fleet)
    assert fleet.machine.living == {}
    assert fleet.store.get("demo").phase == "ready"
    fleet.database.is_full = False
    assert stop(fleet).phase == "stopped"


def test_a_disk_that_fills_up_during_a_stop_keeps_no_process_alive(fleet: FakeFleet) -> None:
    fleet.running()

    def fill(_text: str) -> None:
        fleet.database.is_full = True

    with pytest.raises(StopIncomplete, match="its record still says 'stopping'"):
        stop_job(fleet.store, fleet.backend(), "demo", say=fill)
    assert fleet.machine.living == {}


def test_what_is_left_is_named_on_a_full_disk_too(fleet: FakeFleet) -> None:
    fleet.running()
    fleet.database.is_full, fleet.machine.undying = True, {"decode-0"}
    with pytest.raises(StopIncomplete, match="these processes could not be ended"):
        stop(fleet)
    assert fleet.machine.names() == ["decode-0"]


def test_the_reason_of_a_stop_that_was_cut_off_is_kept(fleet: FakeFleet) -> None:
    job = fleet.running()
    record_stop(fleet.store, job, "decode-0 ended with exit code 1")
    done = stop(fleet)
    assert (done.phase, done.reason) == ("stopped", "decode-0 ended with exit code 1")


def test_why_a_running_job_was_degraded_is_no_reason_of_its_stop(fleet: FakeFleet) -> None:
    fleet.questions.hits = 0
    assert fleet.running().phase == "degraded"
    assert stop(fleet).reason == ""


def test_a_lock_that_the_caller_holds_stays_held(fleet: FakeFleet) -> None:
    job = fleet.running()
    lock = DriverLock(job.directory)
    assert lock.acquire()
    done = stop_job(fleet.store, fleet.backend(), "demo", held=lock)
    assert done.phase == "stopped"
    assert DriverLock(job.directory).held_by_anyone()
    lock.release()
    assert not DriverLock(job.directory).held_by_anyone()


def test_a_job_that_nobody_recorded(fleet: FakeFleet) -> None:
    with pytest.raises(JobUnknown, match="no job is called 'demo'; recorded jobs: none"):
        stop(fleet)
