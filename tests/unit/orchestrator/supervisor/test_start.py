"""A start on a machine that runs nothing: stage by stage, checks, the gate, and all that can come in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from connectors.engine_client import CacheConfig
from orchestrator.errors import JobFailed
from orchestrator.plan.types import JobPlan
from orchestrator.supervisor.interfaces import Progress
from orchestrator.supervisor.start import Overtaken
from tests.fakes.fake_launch import FakeFleet, stages


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def names(plan: JobPlan) -> list[str]:
    return [unit.name for unit in plan.units]


def test_comes_up_stage_by_stage_and_opens_the_gate_once(fleet: FakeFleet) -> None:
    seen_at_start: dict[str, set[str]] = {}
    fleet.machine.on_start = lambda name: seen_at_start.update({name: set(fleet.probe.asked)})
    job = fleet.running()
    assert job.phase == "ready"
    assert job.reason == ""
    assert fleet.machine.started == [name for stage in stages(job.plan) for name in stage]
    lower: set[str] = set()
    for stage in stages(job.plan):
        assert all(lower <= seen_at_start[name] for name in stage)
        lower.update(stage)
    assert fleet.opening.opened == [job.plan.router.url]
    assert all(unit.ready_at is not None for unit in job.units)


def test_every_process_is_asked_until_ready_and_not_after(fleet: FakeFleet) -> None:
    job = fleet.running()
    assert sorted(fleet.probe.asked) == sorted(names(job.plan))


def test_progress_says_what_is_awaited(fleet: FakeFleet) -> None:
    fleet.probe.never_ready = {"prefill-0"}
    doing: list[str] = []

    def watch(progress: Progress) -> None:
        doing.append(progress.now_doing)
        if "prefill-0" in progress.now_doing:
            fleet.probe.never_ready = set()

    fleet.record()
    fleet.starter().bring_up("demo", watch)
    assert "waiting for prefill-0 (GET /health: connection refused)" in doing
    assert doing[-1] == "confirming the engines' weights, opening the router's gate"


def test_a19_caches_that_disagree_fail_the_job_and_the_gate_never_opens(fleet: FakeFleet) -> None:
    fleet.questions.configs = {
        "prefill-0": CacheConfig(block_size=4192, cache_dtype="auto"),
        "decode-0": CacheConfig(block_size=2112, cache_dtype="auto"),
    }
    fleet.record()
    with pytest.raises(JobFailed, match=r"prefill-0 reports block size 4192, decode-0 reports 2112"):
        fleet.bring_up()
    assert fleet.opening.opened == []
    assert fleet.questions.probed == []


def test_a_fence_that_cannot_be_imported_is_named_with_its_mend(fleet: FakeFleet) -> None:
    fleet.machine.log_text = "ModuleNotFoundError: No module named 'connectors.vllm_plugin'\nRuntimeError: bye\n"
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, 1) if name == "decode-0" else None
    fleet.record()
    with pytest.raises(JobFailed, match="mend: this vLLM could not load its fence; install this version of Headrace"):
        fleet.bring_up()


def test_an_engine_that_does_not_report_its_cache_degrades_the_job(fleet: FakeFleet) -> None:
    fleet.questions.configs = {"decode-0": None}
    job = fleet.running()
    assert job.phase == "degraded"
    assert "decode-0 did not report" in job.reason


def test_a21_a_dead_store_degrades_the_job_with_the_reason(fleet: FakeFleet) -> None:
    fleet.questions.hits = 0
    job = fleet.running()
    assert job.phase == "degraded"
    assert "offload ineffective" in job.reason
    assert job.plan.vllm_version in job.reason
    assert fleet.questions.probed == ["prefill-0"]
    assert fleet.opening.opened


def test_a21_a_dead_store_fails_the_job_where_that_is_asked_for(fleet: FakeFleet) -> None:
    fleet.questions.hits = 0
    fleet.record(fleet.plan(checks={"offload_probe": "fail"}))
    with pytest.raises(JobFailed, match="offload ineffective"):
        fleet.bring_up()
    assert fleet.opening.opened == []


def test_a21_not_asked_when_off(fleet: FakeFleet) -> None:
    fleet.questions.hits = 0
    fleet.record(fleet.plan(checks={"offload_probe": "off"}))
    assert fleet.bring_up().phase == "ready"
    assert fleet.questions.probed == []


def test_a21_not_asked_without_a_pool(fleet: FakeFleet) -> None:
    fleet.questions.hits = 0
    fleet.record(fleet.plan(kv_offload="none", roles={"decode": {"kv_offload": "none"}}))
    assert fleet.bring_up().phase == "ready"
    assert fleet.questions.probed == []


def test_a_unit_that_dies_fails_the_job_with_cause_log_and_last_lines(fleet: FakeFleet) -> None:
    fleet.machine.log_text = "loading\nValueError: no such model type\nbye\n"
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, 1) if name == "decode-0" else None
    job = fleet.record()
    with pytest.raises(JobFailed) as failed:
        fleet.bring_up()
    text = str(failed.value)
    assert text.startswith("decode-0 ended with exit code 1 after")
    assert "cause: ValueError: no such model type" in text
    assert f"log: {job.run.log_dir}/decode-0.log" in text
    assert text.endswith("    loading\n    ValueError: no such model type\n    bye")
    assert "router" not in fleet.machine.started
    assert fleet.opening.opened == []


def test_a_missing_library_is_named_with_its_mend(fleet: FakeFleet) -> None:
    fleet.machine.log_text = "m: error while loading shared libraries: liburing.so.2: cannot open shared object file\n"
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, 127)
    fleet.record()
    with pytest.raises(JobFailed, match=r"liburing\.so\.2 is missing; `headrace doctor` names the package"):
        fleet.bring_up()


def test_a_unit_that_is_too_slow_fails_the_job(fleet: FakeFleet) -> None:
    plan = fleet.plan()
    hurried = tuple(replace(unit, ready_timeout_s=0.0) for unit in plan.units)
    fleet.probe.never_ready = {"mooncake-master"}
    fleet.record(replace(plan, units=hurried))
    with pytest.raises(JobFailed, match=r"mooncake-master was not ready within 0 s \(GET /health: connection refused"):
        fleet.bring_up()
    assert fleet.machine.started == ["mooncake-master"]


def test_a_unit_that_dies_during_the_checks_keeps_the_gate_shut(fleet: FakeFleet) -> None:
    fleet.questions.during_probe = lambda: fleet.machine.kill("decode-0")
    fleet.record()
    with pytest.raises(JobFailed, match="decode-0 ended by signal 9"):
        fleet.bring_up()
    assert fleet.opening.opened == []


def test_a_gate_that_does_not_open_fails_the_job(fleet: FakeFleet) -> None:
    fleet.opening.failure = "the router did not open its gate: answered 503"
    fleet.record()
    with pytest.raises(JobFailed, match="the router did not open its gate: answered 503"):
        fleet.bring_up()
    assert fleet.store.get("demo").phase == "starting"


def stop_meanwhile(fleet: FakeFleet) -> None:
    job = fleet.store.get("demo")
    assert fleet.store.set_phase("demo", job.run_id, "stopping", "", 0.0)


@pytest.mark.parametrize("when", ["mooncake-master", "prefill-0", "router"])
def test_a_stop_that_comes_meanwhile_wins_and_nothing_starts_after(fleet: FakeFleet, when: str) -> None:
    fleet.machine.on_start = lambda name: stop_meanwhile(fleet) if name == when else None
    fleet.record()
    with pytest.raises(Overtaken):
        fleet.bring_up()
    assert fleet.machine.started[-1] == when
    assert fleet.opening.opened == []
    assert fleet.store.get("demo").phase == "stopping"


def test_a_stop_during_the_checks_keeps_the_gate_shut(fleet: FakeFleet) -> None:
    fleet.questions.during_probe = lambda: stop_meanwhile(fleet)
    fleet.record()
    with pytest.raises(Overtaken):
        fleet.bring_up()
    assert fleet.opening.opened == []


def test_units_that_a_stop_is_ending_are_no_failure(fleet: FakeFleet) -> None:
    def stopped() -> None:
        stop_meanwhile(fleet)
        fleet.machine.kill("prefill-0")

    fleet.questions.during_probe = stopped
    fleet.record()
    with pytest.raises(Overtaken):
        fleet.bring_up()


class Killed(BaseException):
    """Stands for kill -9: no handler of ours runs."""


@pytest.mark.parametrize("when", ["prefill-0", "router"])
def test_another_supervisor_takes_over_and_starts_only_what_is_missing(fleet: FakeFleet, when: str) -> None:
    def kill(name: str) -> None:
        if name == when:
            raise Killed

    fleet.machine.on_start = kill
    job = fleet.record()
    with pytest.raises(Killed):
        fleet.bring_up()
    before = {unit.record.name: unit.record for unit in fleet.store.get("demo").units}
    assert when not in before
    fleet.machine.on_start = lambda _name: None
    backend = fleet.backend()
    backend.sweep(job.run, tuple(before.values()), 0)
    fleet.machine.started.clear()
    done = fleet.bring_up()
    assert done.phase == "ready"
    assert set(fleet.machine.started) == set(names(job.plan)) - set(before)
    assert {unit.record.name: unit.record for unit in done.units}.items() >= before.items()
    assert sorted(fleet.machine.names()) == sorted(names(job.plan))
    assert len(fleet.opening.opened) == 1
