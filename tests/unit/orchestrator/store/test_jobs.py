"""The record of jobs: what may follow what, and what belongs to which run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.unit import UnitRecord
from orchestrator.errors import JobExists, JobUnknown
from orchestrator.plan.port_map import ports_of
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore, PortsReserved, planned_ports
from orchestrator.store.records import Phase, RecordUnreadable
from tests.fakes.fake_launch import NOW, FakeFleet

PHASES: tuple[Phase, ...] = ("starting", "ready", "degraded", "failed", "stopping", "stopped")
ALLOWED = {
    "starting": {*PHASES},
    "ready": {*PHASES},
    "degraded": {*PHASES},
    "stopping": {"stopping", "failed", "stopped"},
    "failed": set(),
    "stopped": set(),
}


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def unit_record(name: str, pid: int = 7) -> UnitRecord:
    return UnitRecord(name=name, node="n0", pid=pid, start_ticks=1, boot_id="b", log=Path(f"/logs/{name}.log"))


def test_a_job_comes_back_as_it_was_recorded(fleet: FakeFleet) -> None:
    plan = fleet.plan()
    job = fleet.record(plan)
    assert job == fleet.store.get("demo")
    assert job.plan == plan
    assert (job.phase, job.reason, job.created_at, job.phase_at, job.units) == ("starting", "", NOW, NOW, ())
    assert job.run.log_dir == fleet.home / "jobs" / "demo" / "logs" / "19700112T134640Z-run-1"
    assert job.run.private_dir == job.socket_dir == plan.socket_dir


def test_a_name_is_taken_until_its_job_has_ended(fleet: FakeFleet) -> None:
    fleet.record()
    with pytest.raises(JobExists, match=r"'demo' is already recorded as starting; .*headrace down demo"):
        fleet.record(run_id="run-2")
    with pytest.raises(JobExists):
        fleet.store.refuse_recorded("demo")
    fleet.store.set_phase("demo", "run-1", "failed", "", NOW)
    fleet.store.refuse_recorded("demo")
    assert fleet.record(run_id="run-2").run_id == "run-2"


def test_an_unknown_job_lists_the_known_ones(fleet: FakeFleet) -> None:
    fleet.record()
    with pytest.raises(JobUnknown, match="no job is called 'dmeo'; recorded jobs: demo"):
        fleet.store.get("dmeo")
    assert fleet.store.find("dmeo") is None


@pytest.mark.parametrize("before", PHASES)
@pytest.mark.parametrize("after", PHASES)
def test_phases(fleet: FakeFleet, before: Phase, after: Phase) -> None:
    fleet.record()
    fleet.store.set_phase("demo", "run-1", before, "old", NOW)
    moved = fleet.store.set_phase("demo", "run-1", after, "new", NOW + 1)
    assert moved == (after in ALLOWED[before])
    job = fleet.store.get("demo")
    assert (job.phase, job.reason, job.phase_at) == ((after, "new", NOW + 1) if moved else (before, "old", NOW))


def test_another_run_moves_nothing(fleet: FakeFleet) -> None:
    fleet.record()
    assert not fleet.store.set_phase("demo", "run-0", "ready", "", NOW)
    assert fleet.store.is_starting("demo", "run-1")
    assert not fleet.store.is_starting("demo", "run-0")


def test_units_of_an_older_run_are_not_shown(fleet: FakeFleet) -> None:
    fleet.record()
    fleet.store.add_unit("demo", "run-1", unit_record("router"), NOW)
    fleet.store.set_ready("demo", "run-1", "router", NOW + 2)
    assert [unit.ready_at for unit in fleet.store.get("demo").units] == [NOW + 2]
    fleet.store.set_phase("demo", "run-1", "stopped", "", NOW)
    fleet.record(run_id="run-2")
    assert fleet.store.get("demo").units == ()
    fleet.store.add_unit("demo", "run-2", unit_record("router", pid=8), NOW)
    fleet.store.set_ready("demo", "run-1", "router", NOW)
    assert [(unit.record.pid, unit.ready_at) for unit in fleet.store.get("demo").units] == [(8, None)]


def test_units_come_in_the_order_they_started(fleet: FakeFleet) -> None:
    fleet.record()
    for index, name in enumerate(("z", "a", "m")):
        fleet.store.add_unit("demo", "run-1", unit_record(name), NOW + index)
    assert [record.name for record in fleet.store.get("demo").records] == ["z", "a", "m"]


def test_ports_are_reserved_until_the_job_has_ended(fleet: FakeFleet) -> None:
    plan = fleet.plan()
    fleet.record(plan)
    reserved = fleet.store.reserved_ports(except_job="other")
    assert reserved == planned_ports(plan)
    assert {port.port for unit in plan.units for port in unit.ports} <= reserved
    assert fleet.store.reserved_ports(except_job="demo") == frozenset()
    fleet.store.set_phase("demo", "run-1", "stopped", "", NOW)
    assert fleet.store.reserved_ports(except_job="other") == frozenset()


def test_a_job_of_another_version_keeps_its_ports_and_no_other_job_from_being_planned(fleet: FakeFleet) -> None:
    plan = fleet.plan()
    fleet.record(plan)
    with Database(fleet.home).transaction() as connection:
        connection.execute("UPDATE jobs SET plan = '{}'")
    assert fleet.store.reserved_ports(except_job="other") == planned_ports(plan)
    with pytest.raises(PortsReserved):
        fleet.record(replace(plan, job="twin"))


def test_ports_of_a_new_plan_take_the_place_of_those_before(fleet: FakeFleet) -> None:
    plan = fleet.plan()
    fleet.record(plan)
    fleet.store.set_phase("demo", "run-1", "ready", "", NOW)
    fewer = replace(plan, ports=dict([*plan.ports.items()][:1]), units=())
    fleet.store.replan("run-1", fewer, NOW)
    assert fleet.store.reserved_ports(except_job="other") == ports_of(fewer.ports)


def test_a29_two_jobs_cannot_record_the_same_ports(fleet: FakeFleet) -> None:
    """Both were planned before either was recorded."""
    plan = fleet.plan()
    fleet.record(plan)
    with pytest.raises(PortsReserved, match=str(min(ports_of(plan.ports)))):
        fleet.record(replace(plan, job="twin"))
    assert fleet.store.names() == ["demo"]


def test_of_many_creators_of_one_job_exactly_one_wins(fleet: FakeFleet) -> None:
    plan = fleet.plan()
    won: list[str] = []
    refused: list[str] = []
    together = threading.Barrier(8)

    def create(run_id: str) -> None:
        store = JobStore(Database(fleet.home))
        together.wait()
        try:
            store.create(plan, run_id=run_id, directory=fleet.home, now=NOW)
        except JobExists:
            refused.append(run_id)
        else:
            won.append(run_id)

    threads = [threading.Thread(target=create, args=(f"run-{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == 7
    assert fleet.store.get("demo").run_id == won[0]


def test_a_plan_of_another_version_is_an_error_with_words(fleet: FakeFleet) -> None:
    fleet.record()
    with Database(fleet.home).transaction() as connection:
        connection.execute("UPDATE jobs SET plan = '{}'")
    with pytest.raises(RecordUnreadable, match=r"'demo' was recorded by another version.*headrace down demo"):
        _ = fleet.store.get("demo").plan


def test_when_a_run_came_up_and_when_its_stop_was_first_asked_for(fleet: FakeFleet) -> None:
    fleet.record()
    for at, phase in ((1, "ready"), (2, "degraded"), (3, "ready")):
        assert fleet.store.set_phase("demo", "run-1", phase, "", NOW + at)  # type: ignore[arg-type]
    assert fleet.store.get("demo").opened_at == NOW + 1
    assert not fleet.store.ask_stop("demo", "run-1", drain_until=None, now=NOW + 4, only_unopened=True)
    assert fleet.store.ask_stop("demo", "run-1", drain_until=NOW + 60, now=NOW + 5)
    assert fleet.store.ask_stop("demo", "run-1", drain_until=None, now=NOW + 6)
    job = fleet.store.get("demo")
    assert (job.phase, job.stop_asked_at, job.drain_until) == ("stopping", NOW + 5, None)
    fleet.store.set_phase("demo", "run-1", "stopped", "", NOW + 7)
    assert not fleet.store.ask_stop("demo", "run-1", drain_until=None, now=NOW + 8)
    assert not fleet.store.ask_stop("demo", "another run", drain_until=None, now=NOW + 8)


def test_a_stop_keeps_the_reason_of_one_that_is_under_way(fleet: FakeFleet) -> None:
    fleet.record()
    fleet.store.set_phase("demo", "run-1", "stopping", "the router died", NOW + 1)
    fleet.store.ask_stop("demo", "run-1", drain_until=None, now=NOW + 2)
    assert fleet.store.get("demo").reason == "the router died"
