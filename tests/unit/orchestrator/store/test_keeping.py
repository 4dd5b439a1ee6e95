"""Requests about single processes: withdrawn or begun, never both, and listed by how they ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import RequestRefused
from orchestrator.store import keeping
from orchestrator.store.keeping import RequestKind
from orchestrator.store.records import Phase
from tests.fakes.fake_launch import NOW, FakeFleet


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    fleet = FakeFleet(tmp_path)
    fleet.running()
    return fleet


def ask(fleet: FakeFleet, unit: str, kind: RequestKind = "restart") -> int:
    job = fleet.store.get("demo")
    record = next(record for record in job.records if record.name == unit)
    return fleet.keeping.ask("demo", job.run_id, kind, record, why="", is_forced=False, now=NOW)


def done(fleet: FakeFleet, unit: str, kind: RequestKind = "restart") -> int:
    number = ask(fleet, unit, kind)
    fleet.keeping.begin("demo", number, NOW + 1)
    fleet.keeping.end("demo", fleet.keeping.request("demo", number), "done", "", NOW + 2)
    return number


def test_a_request_that_was_withdrawn_is_neither_begun_nor_ended_otherwise(fleet: FakeFleet) -> None:
    number = ask(fleet, "router")
    request = fleet.keeping.request("demo", number)
    assert (request.job, request.run_id) == ("demo", "run-1")
    assert fleet.keeping.withdraw(request, "by request", NOW + 1)
    fleet.keeping.begin("demo", number, NOW + 2)
    fleet.keeping.end("demo", request, "refused", "too late", NOW + 3)
    found = fleet.keeping.request("demo", number)
    assert (found.begun_at, found.outcome, found.note, found.ended_at) == (None, "cancelled", "by request", NOW + 1)
    assert [event.event.kind for event in fleet.store.events.newest(2)] == ["request_asked", "request_ended"]


def test_a_request_that_was_begun_is_not_withdrawn(fleet: FakeFleet) -> None:
    number = ask(fleet, "router")
    fleet.keeping.begin("demo", number, NOW + 1)
    assert not fleet.keeping.withdraw(fleet.keeping.request("demo", number), "by request", NOW + 2)
    assert fleet.keeping.request("demo", number).outcome is None


@pytest.mark.parametrize("phase", ["stopping", "stopped"])
def test_a_run_that_does_not_serve_any_more_is_asked_for_nothing(fleet: FakeFleet, phase: Phase) -> None:
    job = fleet.store.get("demo")
    fleet.store.set_phase("demo", job.run_id, phase, "", NOW)
    with pytest.raises(RequestRefused, match="job 'demo' does not serve any more, or is in another run"):
        ask(fleet, "router")
    with pytest.raises(RequestRefused, match="job 'demo' does not serve any more, or is in another run"):
        fleet.keeping.ask_scale(job, "decode", 2, job.plan, is_forced=True, now=NOW)
    assert fleet.keeping.requests("demo") == []


def test_what_is_open_ends_with_its_run(fleet: FakeFleet) -> None:
    first = done(fleet, "router")
    begun, waiting = (ask(fleet, unit) for unit in ("prefill-0", "decode-0"))
    fleet.keeping.begin("demo", begun, NOW + 1)
    fleet.store.set_phase("demo", "run-1", "stopped", "", NOW + 3)
    found = {each.number: (each.outcome, each.note, each.ended_at) for each in fleet.keeping.requests("demo")}
    cancelled = ("cancelled", "the job has stopped", NOW + 3)
    assert found == {first: ("done", "", NOW + 2), begun: cancelled, waiting: cancelled}
    assert [each.event.kind for each in fleet.store.events.newest(3)] == [*["request_ended"] * 2, "job_phase"]


def test_the_newest_requests_are_kept_and_those_that_say_who_is_drained(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "REQUESTS_KEPT", 2)
    drain = done(fleet, "decode-0", "drain")
    done(fleet, "prefill-0", "drain")
    done(fleet, "prefill-0", "undrain")
    newest = [done(fleet, "router") for _ in range(4)][-2:]
    waiting = ask(fleet, "router")
    found = fleet.keeping.requests("demo")
    assert [each.number for each in found] == [drain, *newest, waiting]
    assert keeping.drained(found) == {"decode-0"}
    done(fleet, "decode-0", "undrain")
    done(fleet, "prefill-0")
    found = fleet.keeping.requests("demo")
    assert [each.number for each in found] == [waiting, waiting + 1, waiting + 2]
    assert keeping.drained(found) == frozenset()


def test_the_newest_of_an_outcome(fleet: FakeFleet) -> None:
    first, second, third = (ask(fleet, unit) for unit in ("router", "prefill-0", "decode-0"))
    fleet.keeping.end("demo", fleet.keeping.request("demo", first), "done", "", NOW + 1)
    for job in ("demo", None):
        assert [each.number for each in fleet.keeping.newest_of_outcome("", job, 10)] in (
            [third, second],
            [second, third],
        )
        assert [each.number for each in fleet.keeping.newest_of_outcome("done", job, 10)] == [first]
        assert len(fleet.keeping.newest_of_outcome("", job, 1)) == 1
    assert fleet.keeping.newest_of_outcome("", "other", 10) == []
