"""The phase that is shown: the record, corrected by what is seen."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import Phase, StoredJob
from orchestrator.supervisor.state import UnitState
from orchestrator.supervisor.view import JobView, glance_at_jobs, true_phase, view_job
from tests.fakes.fake_launch import FakeFleet

UP = ("ready", "ready")
ONE_DEAD = ("ready", "dead")
ALL_DEAD = ("dead", "dead")
ONE_SILENT = ("ready", "starting")
ONE_WAITS = ("starting", "waiting")


@pytest.mark.parametrize(
    ("recorded", "driven", "states", "phase", "says"),
    [
        ("starting", True, ONE_WAITS, "starting", "why"),
        ("starting", True, UP, "starting", "why"),
        ("starting", True, ONE_DEAD, "starting", "not running: u1"),
        ("starting", False, UP, "abandoned", "whoever was starting it is gone"),
        ("starting", False, ALL_DEAD, "abandoned", "headrace down"),
        ("ready", False, UP, "ready", "why"),
        ("ready", False, ONE_SILENT, "degraded", "not answering: u1"),
        ("ready", False, ONE_DEAD, "degraded", "why; not running: u1"),
        ("ready", False, ALL_DEAD, "failed", "no process of the job is alive"),
        ("degraded", False, UP, "degraded", "why"),
        ("degraded", False, ONE_SILENT, "degraded", "why; not answering: u1"),
        ("degraded", False, ALL_DEAD, "failed", "no process"),
        ("stopping", True, ONE_DEAD, "stopping", "why"),
        ("stopping", True, ALL_DEAD, "stopping", "why"),
        ("stopping", False, ONE_DEAD, "abandoned", "why; whoever was stopping it is gone"),
        ("failed", False, ALL_DEAD, "failed", "why"),
        ("failed", True, UP, "failed", "why"),
        ("stopped", False, ALL_DEAD, "stopped", "why"),
        ("stopped", False, UP, "stopped", "why"),
    ],
)
def test_true_phase(recorded: Phase, driven: bool, states: tuple[UnitState, ...], phase: Phase, says: str) -> None:
    named = {f"u{index}": state for index, state in enumerate(states)}
    shown, reason = true_phase(recorded, "why", named, driven=driven)
    assert shown == phase
    assert says in reason


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def look(fleet: FakeFleet) -> JobView:
    return view_job(fleet.store, "demo", fleet.backend(), fleet.probe)


def test_a_running_job_is_looked_at_process_by_process(fleet: FakeFleet) -> None:
    job = fleet.running()
    fleet.machine.kill("decode-0")
    fleet.probe.never_ready = {"router"}
    view = look(fleet)
    assert view.phase == "degraded"
    assert {unit.name: unit.state for unit in view.units} == {
        **{unit.name: "ready" for unit in job.plan.units},
        "decode-0": "dead",
        "router": "starting",
    }
    shown = next(unit for unit in view.units if unit.name == "router")
    assert shown.detail == "GET /health: connection refused"
    assert Path(shown.log) == job.run.log_dir / "router.log"


def test_a_start_whose_driver_is_gone(fleet: FakeFleet) -> None:
    fleet.record()
    assert look(fleet).phase == "abandoned"


def test_a_start_that_is_driven(fleet: FakeFleet) -> None:
    job = fleet.record()
    lock = DriverLock(job.directory)
    assert lock.acquire()
    view = look(fleet)
    lock.release()
    assert view.phase == "starting"
    assert {unit.state for unit in view.units} == {"waiting"}


class StaleOnce(JobStore):
    """Gives the record as it was before the start ended, the first time."""

    stale = True

    def get(self, name: str) -> StoredJob:
        job = super().get(name)
        if self.stale:
            self.stale = False
            return replace(job, phase="starting")
        return job


def test_a_start_that_ends_while_it_is_looked_at_is_not_called_abandoned(fleet: FakeFleet) -> None:
    """The driver sets the phase, then gives its lock back; the record read before must not count."""
    fleet.running()
    view = view_job(StaleOnce(Database(fleet.home)), "demo", fleet.backend(), fleet.probe)
    assert view.phase == "ready"


def test_a_glance_at_all_jobs_tells_who_lives_and_asks_nobody(fleet: FakeFleet) -> None:
    job = fleet.running()
    fleet.machine.kill("decode-0")
    fleet.probe.asked.clear()
    (glance,) = glance_at_jobs(fleet.store, fleet.backend())
    assert (glance.phase, glance.reason) == ("degraded", "not running: decode-0")
    assert {record.name for record in glance.alive} == {record.name for record in job.records} - {"decode-0"}
    assert fleet.probe.asked == []


@pytest.mark.parametrize(("age_s", "phase"), [(0.0, "starting"), (60.0, "abandoned")])
def test_a_glance_gives_a_driver_a_moment_to_come(fleet: FakeFleet, age_s: float, phase: Phase) -> None:
    job = fleet.record(now=time.time() - age_s)
    assert [glance.phase for glance in glance_at_jobs(fleet.store, fleet.backend())] == [phase]
    lock = DriverLock(job.directory)
    assert lock.acquire()
    assert [glance.phase for glance in glance_at_jobs(fleet.store, fleet.backend())] == ["starting"]
    lock.release()
