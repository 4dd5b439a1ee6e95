"""The phase that is shown: the record, corrected by what is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.store.database import Database
from orchestrator.store.driver_lock import DriverLock
from orchestrator.store.jobs import JobStore, Phase, StoredJob
from orchestrator.supervisor.state import UnitState
from orchestrator.supervisor.view import JobView, UnitView, true_phase, view_job
from tests.fakes.fake_launch import FakeFleet


def units(*states: UnitState) -> list[UnitView]:
    return [
        UnitView(name=f"u{index}", node="n", state=state, pid=None, seconds=0, detail="", log="")
        for index, state in enumerate(states)
    ]


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
        ("starting", True, ONE_DEAD, "degraded", "not running: u1"),
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
    shown, reason = true_phase(recorded, "why", units(*states), driven=driven)
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
