"""The supervision of a running job, on threads and a real journal: starts, updates, restarts, deaths."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import JobFailed, UpdateRefused
from orchestrator.observe.engines import PROBE_EPOCH
from orchestrator.store.home import StateUnusable
from orchestrator.store.locks import CoordinatorLock
from orchestrator.store.records import StoredJob
from orchestrator.store.updates import CoordinatorReplaced
from orchestrator.weight_service import PushOptions
from orchestrator.weights import acts, runner
from orchestrator.weights.journal import Journal
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.words import Commitment
from tests.fakes.fake_launch import NOW, FakeFleet
from tests.integration.orchestrator.kept_fleet import supervised, until

LIMITS = {"grace": 0.05, "again": 0.02, "tries": 2}
AS_SET = PushOptions()
NESTED: list[Any] = functools.reduce(lambda inner, _: [inner], range(300), [])


def source(version: str) -> dict[str, str]:
    return {"transport": "path", "version": version, "path": f"/checkpoints/{version}"}


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


@pytest.fixture
def job(fleet: FakeFleet) -> StoredJob:
    """All its processes run, and it serves."""
    fleet.record(fleet.plan(weights={"limits": LIMITS}))
    job = fleet.bring_up()
    fleet.supervision().open(job)
    return job


def committed(fleet: FakeFleet) -> Commitment:
    position = fleet.weights().position("demo")
    assert position is not None
    return position.committed


def is_whole(fleet: FakeFleet, version: str, epoch: int) -> bool:
    """All engines serve this version in this epoch, and nothing is under way."""
    position = fleet.weights().position("demo")
    engines = fleet.receivers.engines.values()
    return (
        position is not None
        and position.course is None
        and fleet.receivers.router.has_pair()
        and {(each.weights, each.epoch, each.paused) for each in engines} == {(version, epoch, False)}
    )


def test_a_job_opens_with_the_weights_that_its_engines_started_with(fleet: FakeFleet, job: StoredJob) -> None:
    assert is_whole(fleet, FIRST_VERSION, 1)
    assert not any(isinstance(each.ask, acts.Load) for each in fleet.receivers.commands)


def test_a_job_whose_engine_does_not_confirm_does_not_open(fleet: FakeFleet) -> None:
    fleet.record(fleet.plan(weights={"limits": {**LIMITS, "pause": 0.1, "command": 0.1}}))
    job = fleet.bring_up()
    fleet.receivers.silent = {"decode-0"}
    with pytest.raises(JobFailed, match="decode-0 did not join|did not open its gate"):
        fleet.supervision().open(job)
    assert fleet.receivers.router.gate == "frozen"


def test_a_push_is_carried_out_by_who_supervises_the_job(fleet: FakeFleet, job: StoredJob) -> None:
    with supervised(fleet):
        record = fleet.weights().push("demo", None, source("step-1"), AS_SET)
        ended = fleet.weights().wait("demo", record.number, 10)
        assert (ended.outcome, ended.why) == ("committed", "")
        until(lambda: is_whole(fleet, "step-1", 2))
        until(lambda: fleet.receivers.purged == [PROBE_EPOCH, 1])


def test_a_push_sees_itself_through_where_nobody_supervises(fleet: FakeFleet, job: StoredJob) -> None:
    for number, version in enumerate(("step-1", "step-2"), start=1):
        record = fleet.weights().push("demo", version, {"transport": "path", "path": "/x"}, AS_SET)
        assert fleet.weights().see_through("demo", record.number).outcome == "committed"
        assert is_whole(fleet, version, number + 1)
    assert [(each.number, each.push.version) for each in fleet.weights().history("demo", 9)] == [
        *[(1, "step-1"), (2, "step-2")]
    ]


def test_a28_a_version_that_one_engine_cannot_load_is_not_served_and_may_be_tried_again(
    fleet: FakeFleet, job: StoredJob
) -> None:
    fleet.receivers.load_ends = {"decode-0": "untouched"}
    weights = fleet.weights()
    failed = weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    assert (failed.outcome, "decode-0: untouched: no bytes" in failed.why) == ("rolled_back", True)
    assert committed(fleet).version == FIRST_VERSION
    fleet.receivers.load_ends = {}
    again = weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    assert (again.outcome, committed(fleet).version) == ("committed", "step-1")


@pytest.mark.parametrize(
    ("version", "given", "options", "says"),
    [
        (FIRST_VERSION, {"transport": "store"}, AS_SET, "names other weights already"),
        (None, {"transport": "path"}, AS_SET, "version is missing, and the source has none"),
        ("a b", {"transport": "path"}, AS_SET, "version is 'a b': 1 to 128 printable"),
        ("a", {"path": "/x"}, AS_SET, "source.transport must be"),
        ("a", {"transport": "pigeon"}, AS_SET, "source.transport must be"),
        ("a", {"transport": "path"}, AS_SET, "source.path is None: give the checkpoint's folder"),
        ("a", {"transport": "path", "path": "step-1"}, AS_SET, "source.path is 'step-1': give"),
        ("a", {"transport": "store", "job": float("nan")}, AS_SET, "no plain JSON"),
        ("a", {"transport": "store", "job": "\ud800"}, AS_SET, "no plain JSON"),
        ("a", {"transport": "store", "\ud800": "/x"}, AS_SET, "no plain JSON"),
        ("a", {"transport": "store", "job": NESTED}, AS_SET, "no plain JSON"),
        ("a", {"transport": "store", "job": "x" * 65_000}, AS_SET, "no plain JSON"),
        ("a", source("b"), AS_SET, "name it once"),
        ("a", {"transport": "store"}, PushOptions(strategy="rolling"), "rolling needs a second pair"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_it_is_noted(
    fleet: FakeFleet, job: StoredJob, version: str | None, given: dict[str, Any], options: PushOptions, says: str
) -> None:
    with pytest.raises(UpdateRefused, match=says):
        fleet.weights().push("demo", version, given, options)
    assert fleet.weights().history("demo", 9) == []


def test_one_push_at_a_time(fleet: FakeFleet, job: StoredJob) -> None:
    fleet.weights().push("demo", None, source("step-1"), AS_SET)
    with pytest.raises(UpdateRefused, match="update 1 of job 'demo' is under way"):
        fleet.weights().push("demo", None, source("step-2"), AS_SET)


def test_a_job_without_weights_or_one_that_ended_takes_none(fleet: FakeFleet) -> None:
    fleet.record()
    with pytest.raises(UpdateRefused, match="is starting"):
        fleet.weights().push("demo", None, source("step-1"), AS_SET)
    fleet.bring_up()
    with pytest.raises(UpdateRefused, match="start it with a \\[weights\\] section"):
        fleet.weights().push("demo", None, source("step-1"), AS_SET)


def test_an_update_that_hangs_is_cancelled_and_the_old_weights_serve_on(fleet: FakeFleet, job: StoredJob) -> None:
    weights = fleet.weights()
    fleet.receivers.silent = {"prefill-0"}
    with supervised(fleet):
        number = weights.push("demo", None, source("step-1"), AS_SET).number
        until(lambda: any(isinstance(each.ask, acts.Pause) for each in fleet.receivers.commands))
        assert weights.cancel("demo", number).outcome is None
        fleet.receivers.silent = set()
        ended = weights.wait("demo", number, 10)
        assert (ended.outcome, ended.why, ended.is_cancelled) == ("cancelled", "by request", True)
        until(lambda: is_whole(fleet, FIRST_VERSION, 1))
        assert weights.cancel("demo", number) == ended, "once it has ended nothing changes"


def test_a_disk_that_takes_its_time_gets_nobody_restarted(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record takes longer than what follows it may."""
    fleet.record(fleet.plan(weights={"limits": {**LIMITS, "hold": 0.2, "pause": 0.2, "command": 0.2}}))
    fleet.supervision().open(fleet.bring_up())
    write = fleet.updates.record

    def written_slowly(job: str, run_id: str, generation: int, position: str, *more: Any) -> None:
        if '"phase":"resume"' in position:
            time.sleep(0.3)
        write(job, run_id, generation, position, *more)

    monkeypatch.setattr(fleet.updates, "record", written_slowly)
    monkeypatch.setattr(runner, "HELD_UP_S", 0.05)
    weights = fleet.weights()
    ended = weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    assert (ended.outcome, weights.remarks("demo")) == ("committed", [])


def test_an_update_that_nobody_has_begun_is_cancelled_without_an_act(fleet: FakeFleet, job: StoredJob) -> None:
    weights = fleet.weights()
    number = weights.push("demo", None, source("step-1"), AS_SET).number
    weights.cancel("demo", number)
    assert weights.see_through("demo", number).outcome == "cancelled"
    assert is_whole(fleet, FIRST_VERSION, 1)
    again = weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    assert (again.outcome, is_whole(fleet, "step-1", 2)) == ("committed", True)


def test_a_coordinator_that_died_anywhere_is_followed_by_one_that_ends_the_update(
    fleet: FakeFleet, job: StoredJob
) -> None:
    """Its successor begins while it is anywhere between its first turn and its last."""
    for after in (1, 2, 4, 8, 16, 32):
        version = f"step-{after}"
        number = fleet.weights().push("demo", None, source(version), AS_SET).number
        turns = iter(range(60))

        def is_over(_position: object, turns: Iterator[int] = turns, after: int = after) -> bool:
            turn = next(turns, None)
            if turn == after:
                Journal(fleet.updates, "demo", job.run_id)
            return turn is None

        # One that has nothing to record any more has nothing to send either, and need not notice.
        with suppress(CoordinatorReplaced):
            fleet.supervision().keep("demo", is_over)
        assert fleet.weights().see_through("demo", number).outcome == "committed"
        fleet.supervision().keep("demo", lambda position: position.course is None)
        assert is_whole(fleet, version, committed(fleet).epoch)
    epochs = [each.ask.epoch for each in fleet.receivers.commands if isinstance(each.ask, acts.PublishEpoch)]
    assert epochs == sorted(epochs)


def test_two_supervisors_never_act_on_one_job(fleet: FakeFleet, job: StoredJob) -> None:
    lock = CoordinatorLock(job.directory)
    assert lock.acquire()
    try:
        before = len(fleet.receivers.commands)
        assert fleet.supervision().keep("demo", lambda _position: True) is False
        assert len(fleet.receivers.commands) == before
    finally:
        lock.release()


def test_a41_an_engine_that_died_is_started_again_and_joins_what_is_served(fleet: FakeFleet, job: StoredJob) -> None:
    weights = fleet.weights()
    weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    fleet.machine.on_start = lambda name: fleet.receivers.boot(name) if name in fleet.receivers.engines else None
    with supervised(fleet):
        fleet.receivers.engines["decode-0"].end()
        fleet.machine.kill("decode-0")
        until(lambda: fleet.machine.started.count("decode-0") == 2)
        until(lambda: is_whole(fleet, "step-1", 2))
    assert weights.remarks("demo")[-1].text == "decode-0 has loaded version step-1 from its own source"


def test_a_router_that_died_is_started_again_and_told_everything(fleet: FakeFleet, job: StoredJob) -> None:
    fleet.machine.on_start = lambda name: fleet.receivers.router.boot() if name == "router" else None
    with supervised(fleet):
        fleet.machine.kill("router")
        until(lambda: fleet.machine.started.count("router") == 2)
        until(lambda: is_whole(fleet, FIRST_VERSION, 1))


@pytest.mark.parametrize("call", ["unended", "is_serving", "get"])
def test_a_database_that_is_locked_for_a_while_ends_no_supervision(
    fleet: FakeFleet, job: StoredJob, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    number = fleet.weights().push("demo", None, source("step-1"), AS_SET).number
    real, failures = getattr(fleet.store, call), iter(range(3))

    def locked_at_first(*given: str) -> object:
        if next(failures, None) is not None:
            raise StateUnusable(fleet.home, "database is locked")
        return real(*given)

    monkeypatch.setattr(fleet.store, call, locked_at_first)
    with supervised(fleet):
        until(lambda: next(failures, None) is None)
        assert fleet.weights().wait("demo", number, 10).outcome == "committed"


def test_a_job_that_is_stopped_is_left_alone(fleet: FakeFleet, job: StoredJob) -> None:
    with supervised(fleet):
        fleet.service().stop("demo")
        started = len(fleet.machine.started)
        time.sleep(0.1)
        assert len(fleet.machine.started) == started
        assert fleet.machine.living == {}


def test_what_was_asked_for_belongs_to_its_run(fleet: FakeFleet, job: StoredJob) -> None:
    weights = fleet.weights()
    weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    late = Journal(fleet.updates, "demo", job.run_id)
    position = late.newest()
    assert position is not None
    fleet.service().stop("demo")
    fleet.record(fleet.plan(), run_id="run-2", now=NOW + 1)
    assert (fleet.weights().history("demo", 9), fleet.weights().position("demo")) == ([], None)
    with pytest.raises(CoordinatorReplaced):
        late.record(position)
    with pytest.raises(CoordinatorReplaced):
        Journal(fleet.updates, "demo", "run-1")


def told(fleet: FakeFleet) -> list[str]:
    return [each.event.text for each in fleet.store.events.since(0, 1000, "demo")]


def test_an_update_is_told_step_by_step(fleet: FakeFleet, job: StoredJob) -> None:
    seq = fleet.store.events.newest_seq()
    weights = fleet.weights()
    weights.see_through("demo", weights.push("demo", None, source("step-1"), AS_SET).number)
    events = [each.event for each in fleet.store.events.since(seq, 1000, "demo")]
    kinds = [event.kind for event in events]
    assert kinds[:2] == ["update_asked", "job_adopted"]
    assert kinds.count("update_ended") == kinds.count("version_committed") == 1
    phases = [event.data["phase"] for event in events if event.kind == "update_phase"]
    assert phases[:2] == ["prefetch", "hold"]
    assert phases[-1] == "purge"
    gates = [event.data["gate"] for event in events if event.kind == "gate"]
    assert gates == ["holding", "frozen", "open"]
    joined = [(event.process, event.data) for event in events if event.kind == "engine_joined"]
    assert sorted(joined) == [(name, {"version": "step-1", "epoch": 2}) for name in ("decode-0", "prefill-0")]
    assert "/checkpoints" not in str(events)


def test_whoever_adopts_a_job_says_what_was_found(fleet: FakeFleet, job: StoredJob) -> None:
    fleet.machine.on_start = lambda name: fleet.receivers.boot(name) if name in fleet.receivers.engines else None
    fleet.receivers.engines["decode-0"].end()
    fleet.machine.kill("decode-0")
    fleet.probe.never_ready = {"prefill-0"}
    with supervised(fleet):
        until(lambda: any("supervised under pid" in text for text in told(fleet)))
        fleet.probe.never_ready = set()
        until(lambda: fleet.machine.started.count("decode-0") == 2)
        until(lambda: is_whole(fleet, FIRST_VERSION, 1))
    (adopted,) = [text for text in told(fleet) if "supervised under pid" in text]
    assert f"under pid {os.getpid()}" in adopted
    assert "not running: decode-0" in adopted
    assert "not answering: prefill-0" in adopted
    assert [text for text in told(fleet) if text.startswith("decode-0 (pid")] != []


def test_an_adopted_update_is_named(fleet: FakeFleet, job: StoredJob) -> None:
    fleet.receivers.silent = {"prefill-0"}
    fleet.weights().push("demo", None, source("step-1"), AS_SET)
    fleet.supervision().keep("demo", lambda position: position.course is not None)
    fleet.supervision().keep("demo", lambda _position: True)
    assert any(re.match(r"supervised, update 1 goes on in \w+ \(forward\), under pid", text) for text in told(fleet))
