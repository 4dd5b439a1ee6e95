"""The steps of a start and their failures, on a machine that runs nothing."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.errors import PortTaken
from orchestrator.errors import JobExists, JobFailed, JobUnknown, PlanRefused, Unsupported
from orchestrator.plan.facts import ClusterFacts
from orchestrator.service import RUNS_KEPT
from orchestrator.spec.job import JobSpec
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import StoredJob
from orchestrator.supervisor.stop import StopIncomplete
from tests.fakes.fake_launch import NOW, FakeFleet
from tests.unit.orchestrator.samples import facts_of, pd_data, plan_of


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def up(fleet: FakeFleet, **changes: object) -> StoredJob:
    service = fleet.service()
    return service.drive(service.admit(fleet.spec(**changes)), fleet.shown.append)


def test_up_look_down(fleet: FakeFleet) -> None:
    job = up(fleet)
    service = fleet.service()
    assert job.phase == "ready"
    assert fleet.machine.prepared == [job.run_id]
    assert [glance.phase for glance in service.glances()] == ["ready"]
    assert not service.is_driven("demo")
    assert service.stop("demo").phase == "stopped"
    assert service.view("demo").phase == "stopped"
    assert fleet.machine.living == {}


def test_planning_records_nothing(fleet: FakeFleet) -> None:
    fleet.service().plan(fleet.spec())
    assert fleet.store.names() == []


def test_a_plan_with_errors_is_refused_and_not_recorded(fleet: FakeFleet) -> None:
    with pytest.raises(PlanRefused, match="block_size"):
        fleet.service().admit(fleet.spec(roles={"prefill": {"engine": {"block_size": 64}}}))
    assert fleet.store.names() == []


def test_a_recorded_job_is_refused_before_it_is_planned(fleet: FakeFleet) -> None:
    up(fleet)
    asked: list[str] = []
    fleet.facts = lambda spec, _folder, _ports: asked.append(spec.name)  # type: ignore[func-returns-value, assignment, return-value]
    with pytest.raises(JobExists, match="already recorded as ready"):
        fleet.service().admit(fleet.spec())
    assert asked == []


def test_a_backend_of_a_later_version_is_refused(fleet: FakeFleet) -> None:
    with pytest.raises(Unsupported, match=r'launch\.backend: .*not slurm; set launch\.backend = "local"'):
        fleet.service().admit(fleet.spec(launch={"backend": "slurm"}))


def test_admission_keeps_every_other_driver_off(fleet: FakeFleet) -> None:
    service = fleet.service()
    admission = service.admit(fleet.spec())
    assert service.is_driven("demo")
    assert service.view("demo").phase == "starting"
    with pytest.raises(JobExists, match="brought up or stopped by another process"):
        service.resume("demo")
    service.drive(admission, fleet.shown.append)
    assert not service.is_driven("demo")


def test_a29_a_job_that_took_the_ports_meanwhile_is_planned_around(fleet: FakeFleet) -> None:
    """The other job is recorded after this one was planned."""
    usual = fleet.facts
    calls: list[frozenset[int]] = []

    def facts(spec: JobSpec, folder: Path, reserved: frozenset[int]) -> ClusterFacts:
        calls.append(reserved)
        if len(calls) == 1:
            fleet.record(replace(plan_of(pd_data(), facts_of()), job="other"))
        return usual(spec, folder, reserved)

    fleet.facts = facts
    with pytest.raises(PlanRefused, match=r"router\.port"):
        fleet.service().admit(fleet.spec())
    admission = fleet.service().admit(fleet.spec(router={"port": 18123}))
    admission.lock.release()
    assert calls[0] == frozenset()
    ports = fleet.store.reserved_ports(except_job="other")
    assert ports.isdisjoint(fleet.store.reserved_ports(except_job="demo"))


def test_a_failure_ends_everything_and_is_recorded(fleet: FakeFleet) -> None:
    fleet.machine.log_text = "ValueError: no such model\n"
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, 1) if name == "decode-0" else None
    with pytest.raises(JobFailed, match="ValueError: no such model"):
        up(fleet)
    job = fleet.store.get("demo")
    assert job.phase == "failed"
    assert "decode-0 ended with exit code 1" in job.reason
    assert fleet.machine.living == {}
    assert not fleet.service().is_driven("demo")


def test_a29_a_taken_port_fails_before_anything_starts(fleet: FakeFleet) -> None:
    fleet.machine.prepare_fails = PortTaken(port=9003, purpose="metrics", unit="master", holder="pid 1", mend="free it")
    with pytest.raises(JobFailed, match=r"port 9003 \(metrics of master\) is taken by pid 1; free it"):
        up(fleet)
    assert fleet.machine.started == []
    assert fleet.store.get("demo").phase == "failed"


def test_what_cannot_be_ended_after_a_failure_is_said_beside_the_cause(fleet: FakeFleet) -> None:
    fleet.machine.undying = {"prefill-0"}
    fleet.opening.failure = "the router did not open its gate"
    with pytest.raises(JobFailed, match=r"(?s)did not open its gate.*could not be ended"):
        up(fleet)
    job = fleet.store.get("demo")
    assert job.phase == "stopping"
    assert "did not open its gate" in job.reason


def test_ctrl_c_stops_the_job(fleet: FakeFleet) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fleet.questions.during_probe = interrupt
    with pytest.raises(KeyboardInterrupt):
        up(fleet)
    job = fleet.store.get("demo")
    assert (job.phase, job.reason) == ("stopped", "its start was interrupted")
    assert fleet.machine.living == {}
    assert not fleet.service().is_driven("demo")


def interrupt_ends(fleet: FakeFleet, times: int) -> None:
    """The start is interrupted, and so is its end, so many times, half way."""
    left = iter(range(times))
    end = fleet.machine.end

    def interrupt() -> None:
        raise KeyboardInterrupt

    def end_some(pids: list[int]) -> tuple[int, ...]:
        if pids and next(left, None) is not None:
            end(pids[:1])
            raise KeyboardInterrupt
        return end(pids)

    fleet.questions.during_probe = interrupt
    fleet.machine.end = end_some  # type: ignore[method-assign, assignment]


def test_ctrl_c_twice_in_a_hurry_stops_the_job_as_well(fleet: FakeFleet) -> None:
    interrupt_ends(fleet, 1)
    with pytest.raises(KeyboardInterrupt):
        up(fleet)
    job = fleet.store.get("demo")
    assert (job.phase, job.reason) == ("stopped", "its start was interrupted")
    assert fleet.machine.living == {}
    assert fleet.shown[-1].now_doing == "ending demo; interrupt again to leave it as it is"


def test_ctrl_c_once_more_leaves_it(fleet: FakeFleet) -> None:
    interrupt_ends(fleet, 2)
    with pytest.raises(KeyboardInterrupt):
        up(fleet)
    assert fleet.store.get("demo").phase == "stopping"
    assert fleet.machine.living != {}
    assert not fleet.service().is_driven("demo")


def test_ctrl_c_while_a_failed_start_is_ended_does_not_cut_that_off(fleet: FakeFleet) -> None:
    interrupt_ends(fleet, 1)
    fleet.questions.during_probe = lambda: None
    fleet.opening.failure = "the router did not open its gate"
    with pytest.raises(JobFailed, match="did not open its gate"):
        up(fleet)
    assert (fleet.store.get("demo").phase, fleet.machine.living) == ("failed", {})


def test_a_disk_that_fills_up_during_a_start_is_its_cause(fleet: FakeFleet) -> None:
    def fill(name: str) -> None:
        fleet.database.is_full = name == "decode-0"

    fleet.machine.on_start = fill
    service = fleet.service()
    with pytest.raises(JobFailed, match=r"(?s)disk is full; make room.*its record still says 'starting'"):
        service.drive(service.admit(fleet.spec()), fleet.shown.append)
    assert fleet.machine.living == {}
    view = service.view("demo")
    assert view.phase == "abandoned"
    assert "disk is full; make room" in view.reason
    fleet.database.is_full = False
    assert service.stop("demo").phase == "stopped"


def test_a_job_on_a_full_disk_is_stopped(fleet: FakeFleet) -> None:
    up(fleet)
    fleet.database.is_full = True
    with pytest.raises(StopIncomplete, match="its record still says 'ready'"):
        fleet.service().stop("demo")
    assert fleet.machine.living == {}


def test_an_error_that_nobody_foresaw_ends_the_job_too(fleet: FakeFleet) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("by nought")

    fleet.questions.during_probe = break_down
    with pytest.raises(ZeroDivisionError):
        up(fleet)
    job = fleet.store.get("demo")
    assert (job.phase, job.reason) == ("failed", "unexpected ZeroDivisionError: by nought")
    assert fleet.machine.living == {}


def test_the_lock_is_held_until_everything_is_ended(fleet: FakeFleet) -> None:
    """Nobody may take the start over while its failure is cleaned up."""
    held: list[bool] = []
    fleet.opening.failure = "no"
    service = fleet.service()
    end = fleet.machine.end

    def watch(pids: list[int]) -> tuple[int, ...]:
        held.append(service.is_driven("demo"))
        return end(pids)

    fleet.machine.end = watch  # type: ignore[method-assign, assignment]
    with pytest.raises(JobFailed):
        up(fleet)
    assert set(held) == {True}


def test_a_stop_by_another_command_is_said(fleet: FakeFleet) -> None:
    fleet.questions.during_probe = lambda: fleet.service().begin_stop("demo")
    with pytest.raises(JobFailed, match="'demo' was stopped by another command while it was coming up"):
        up(fleet)
    assert fleet.service().stop("demo").phase == "stopped"
    assert fleet.machine.living == {}


def test_a_start_whose_driver_was_killed_is_taken_over(fleet: FakeFleet) -> None:
    service = fleet.service()
    job = fleet.record()
    first = job.plan.units[0]
    fleet.store.add_unit("demo", job.run_id, fleet.backend().start(job.run, first), NOW)
    stray = fleet.machine.run(job.run_id, "prefill-0")
    done = service.drive(service.resume("demo"), fleet.shown.append)
    assert done.phase == "ready"
    assert stray not in fleet.machine.living
    assert fleet.machine.started.count(first.name) == 1
    assert fleet.machine.prepared == []


def test_only_a_start_can_be_taken_over(fleet: FakeFleet) -> None:
    service = fleet.service()
    up(fleet)
    with pytest.raises(JobExists, match="is ready; there is no start to take over"):
        service.resume("demo")
    assert not service.is_driven("demo")
    with pytest.raises(JobUnknown):
        service.resume("nobody")
    assert not service.is_driven("nobody")


def test_leftovers_of_an_ended_run_are_ended_before_its_record_goes(fleet: FakeFleet) -> None:
    old = fleet.running()
    fleet.store.set_phase("demo", old.run_id, "failed", "", NOW)
    new = up(fleet)
    assert new.run_id != old.run_id
    assert {run_id for run_id, _ in fleet.machine.living.values()} == {new.run_id}


def test_the_token_is_fresh_and_for_its_owner_alone(fleet: FakeFleet) -> None:
    token = Path(fleet.plan().router.token_file)
    token.parent.mkdir(parents=True)
    token.write_text("old")
    token.chmod(0o644)
    up(fleet)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text().strip()) >= 32


def test_a_token_that_cannot_be_written_is_an_error_with_words(fleet: FakeFleet) -> None:
    Path(fleet.plan().router.token_file).mkdir(parents=True)
    with pytest.raises(JobFailed, match="token cannot be used: .*Is a directory"):
        up(fleet)
    assert fleet.store.get("demo").phase == "failed"


def test_old_logs_are_dropped(fleet: FakeFleet) -> None:
    logs = fleet.store.folder("demo") / "logs"
    for day in range(10, 20):
        (logs / f"202501{day}T000000Z-aaaa").mkdir(parents=True)
    (logs / "mine").mkdir()
    job = up(fleet)
    kept = sorted(folder.name for folder in logs.iterdir())
    assert kept == [*(f"202501{day}T000000Z-aaaa" for day in range(16, 20)), job.run.log_dir.name, "mine"]
    assert len(kept) == RUNS_KEPT + 1


def test_a_stop_is_on_record_before_it_is_answered(fleet: FakeFleet) -> None:
    up(fleet)
    service = fleet.service()
    service.begin_stop("demo")
    assert fleet.store.get("demo").phase == "stopping"
    lock = DriverLock(fleet.store.folder("demo"))
    assert not lock.held_by_anyone()
    assert service.stop("demo").phase == "stopped"
    service.begin_stop("demo")
    assert fleet.store.get("demo").phase == "stopped"
