"""Replicas that come and go while a job serves, on threads and a real record: two pairs of engines to begin with."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from connectors.types import Role
from deploy.errors import FileNotWritten
from orchestrator.errors import PlanRefused, RequestRefused, RequestUnknown
from orchestrator.plan.scale import replicas_of, scaled_plan
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import ReplicaRequest
from orchestrator.supervisor import restarts
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import (
    STEADY,
    ended,
    impatient,
    job_of,
    lives,
    pushed,
    supervised,
    until,
    usable,
)
from tests.unit.orchestrator.samples import facts_of


class Killed(BaseException):
    """The control plane, where it stands."""


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def fleet(two_pairs: FakeFleet) -> FakeFleet:
    return two_pairs


def scaled(fleet: FakeFleet, role: Role, replicas: int, *, force: bool = False) -> ReplicaRequest:
    return fleet.replicas().scale("demo", role, replicas, force=force)


def test_a_new_replica_gets_requests_once_it_has_what_the_job_serves(fleet: FakeFleet) -> None:
    before = {unit.name: unit for unit in job_of(fleet).plan.units}
    with supervised(fleet):
        pushed(fleet)
        request = ended(fleet, scaled(fleet, "decode", 3))
        assert (request.outcome, request.note, request.replicas) == ("done", "", 3)
        assert usable(fleet) == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
        assert fleet.receivers.engines["decode-2"].weights == "step-1"
    after = {unit.name: unit for unit in job_of(fleet).plan.units}
    assert {name: after[name] for name in before} == before
    assert [lives(fleet, name) for name in after] == [1] * len(after)
    assert fleet.service().view("demo").phase == "ready"


def test_the_last_replica_leaves_when_its_requests_have_ended(fleet: FakeFleet) -> None:
    fleet.receivers.legs = {"prefill-1": 2}
    with supervised(fleet):
        request = scaled(fleet, "prefill", 1)
        until(lambda: fleet.receivers.router.replicas["prefill-1"].draining)
        time.sleep(0.1)
        assert "prefill-1" in fleet.machine.names()
        assert "prefill is being scaled to 1" in fleet.service().view("demo").reason
        fleet.receivers.legs = {}
        assert ended(fleet, request).outcome == "done"
        until(lambda: "prefill-1" not in fleet.receivers.router.replicas)
    assert fleet.receivers.settled == ["prefill-1"]
    assert "prefill-1" not in fleet.machine.names()
    assert replicas_of(job_of(fleet).plan, "prefill") == ("prefill-0",)
    assert [record.name for record in job_of(fleet).records if record.name.startswith("prefill")] == ["prefill-0"]
    assert usable(fleet) == {"prefill-0", "decode-0", "decode-1"}


def test_there_and_back_again_by_several(fleet: FakeFleet) -> None:
    with supervised(fleet):
        for replicas in (3, 1, 2):
            assert ended(fleet, scaled(fleet, "decode", replicas)).outcome == "done"
            until(lambda replicas=replicas: len(usable(fleet)) == 2 + replicas)
    assert fleet.service().view("demo").phase == "ready"
    assert job_of(fleet).plan.spec.roles.decode.replicas == 2


def test_a_replica_that_was_drained_when_it_left_is_not_drained_when_it_comes_again(fleet: FakeFleet) -> None:
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "decode-1", force=False)).outcome == "done"
        assert ended(fleet, scaled(fleet, "decode", 1)).outcome == "done"
        assert ended(fleet, scaled(fleet, "decode", 2)).outcome == "done"
        assert "decode-1" in usable(fleet)


def test_what_cannot_be_is_refused_and_changes_nothing(fleet: FakeFleet) -> None:
    before = job_of(fleet).plan
    with supervised(fleet):
        with pytest.raises(RequestUnknown, match="has no role 'colocated'; it has: prefill, decode"):
            scaled(fleet, "colocated", 2)
        with pytest.raises(RequestRefused, match="has 2 of role decode already"):
            scaled(fleet, "decode", 2)
        assert ended(fleet, fleet.replicas().drain("demo", "decode-0", force=False)).outcome == "done"
        with pytest.raises(RequestRefused, match=r"without decode-1 only prefill-0, prefill-1 would serve.*; force it"):
            scaled(fleet, "decode", 1)
        fleet.facts = lambda _spec, folder, _reserved: facts_of(job_dir=str(folder), fingerprint="other")
        with pytest.raises(PlanRefused, match=r"roles.decode.replicas: .*files have changed since the job was started"):
            scaled(fleet, "decode", 3)
    assert job_of(fleet).plan == before


def test_one_at_a_time(fleet: FakeFleet) -> None:
    scaled(fleet, "decode", 3)
    with pytest.raises(RequestRefused, match="request 1 scales the job already"):
        scaled(fleet, "prefill", 3)
    with pytest.raises(RequestRefused, match="request 1 about decode has not ended yet"):
        scaled(fleet, "decode", 1)


def test_files_that_cannot_be_written_leave_the_job_as_it_is(fleet: FakeFleet) -> None:
    before = job_of(fleet).plan
    fleet.machine.prepare_fails = FileNotWritten(path=Path("/jobs/router.json"), cause="No space left on device")
    with supervised(fleet):
        request = ended(fleet, scaled(fleet, "decode", 3))
    assert request.outcome == "failed"
    assert "No space left on device" in request.note
    assert job_of(fleet).plan == before


def test_an_engine_that_does_not_come_up_is_told_with_its_cause(fleet: FakeFleet) -> None:
    start = fleet.machine.on_start

    def dies(name: str) -> None:
        start(name)
        if name == "decode-2":
            fleet.machine.kill(name)

    fleet.machine.on_start = dies
    with supervised(fleet):
        request = ended(fleet, scaled(fleet, "decode", 3))
        assert request.outcome == "failed"
        assert "decode-2" in request.note
        assert usable(fleet) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
        assert ended(fleet, scaled(fleet, "decode", 2)).outcome == "done"
    assert fleet.service().view("demo").phase == "ready"


def test_an_engine_that_comes_up_and_does_not_serve_is_told_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "POLICIES", dict.fromkeys(restarts.POLICIES, STEADY))
    fleet = impatient(FakeFleet(tmp_path, pairs=2))
    fleet.receivers.load_ends = {"decode-2": "untouched"}
    with supervised(fleet):
        pushed(fleet)
        request = scaled(fleet, "decode", 3)
        behind = fleet.replicas().restart("demo", "router", force=True)
        found = ended(fleet, request)
        assert (found.outcome, found.note.endswith(" after 1.5 s")) == ("failed", True)
        assert found.note.startswith(("decode-2 is up, and does not serve", "decode-2 is not up"))
        assert ended(fleet, behind).outcome == "done"
        assert ended(fleet, scaled(fleet, "decode", 2)).outcome == "done"
        until(lambda: usable(fleet) == {"prefill-0", "prefill-1", "decode-0", "decode-1"})


def test_what_would_not_end_is_told_and_holds_nobody_up(fleet: FakeFleet) -> None:
    fleet.machine.undying = {"decode-1"}
    with supervised(fleet):
        request = ended(fleet, scaled(fleet, "decode", 1))
        assert request.outcome == "failed"
        assert "these processes could not be ended" in request.note
        fleet.machine.kill("prefill-0")
        until(lambda: lives(fleet, "prefill-0") == 2)
        fleet.machine.undying = set()
        until(lambda: "decode-1" not in fleet.machine.names())


def test_a_plan_of_what_the_job_was_is_refused(fleet: FakeFleet) -> None:
    before = job_of(fleet)
    with supervised(fleet):
        assert ended(fleet, scaled(fleet, "prefill", 3)).outcome == "done"
    stale = scaled_plan(before.plan, "decode", 1, facts_of())
    with pytest.raises(RequestRefused, match="planned anew meanwhile; ask again"):
        fleet.keeping.ask_scale(before, "decode", 1, stale, is_forced=False, now=time.time())


def test_one_that_was_never_started_cannot_be_restarted(fleet: FakeFleet) -> None:
    with supervised(fleet):
        fleet.machine.prepare_fails_for = {"decode-2"}
        request = ended(fleet, scaled(fleet, "decode", 3))
        assert request.outcome == "failed"
        with pytest.raises(RequestRefused, match="decode-2 was never started"):
            fleet.replicas().restart("demo", "decode-2", force=False)
        assert ended(fleet, scaled(fleet, "decode", 2)).outcome == "done"


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "moment", ["replan before", "replan after", "add_unit before", "add_unit after", "remove_unit before"]
)
def test_a_control_plane_that_is_killed_on_the_way_is_followed_by_one_that_goes_on(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, replicas: int, moment: str
) -> None:
    method, when = moment.split()
    before = getattr(JobStore, method)
    struck: list[str] = []

    def once(store: JobStore, *given: object, **named: object) -> object:
        done = before(store, *given, **named) if when == "after" or struck else None
        if not struck:
            struck.append(method)
            raise Killed
        return done

    with monkeypatch.context() as patched, supervised(fleet):
        patched.setattr(JobStore, method, once)
        patched.setattr("threading.excepthook", lambda _args: None)
        request = scaled(fleet, "decode", replicas)
        until(lambda: bool(struck) or fleet.replicas().request("demo", request.number).outcome is not None)
    with supervised(fleet):
        assert ended(fleet, request).outcome == "done"
        until(lambda: len(usable(fleet)) == 2 + replicas)
    names = [name for name in fleet.machine.names() if name.startswith("decode")]
    assert sorted(names) == [f"decode-{index}" for index in range(replicas)]
    fleet.service().stop("demo")
    assert fleet.machine.names() == []
