"""What the records of a job say of each thing that somebody has asked of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.operations import (
    Operation,
    OperationId,
    id_of,
    newest_of_run,
    past_cancelling,
    read_id,
    request_of,
    start_of,
    stop_of,
    update_of,
)
from orchestrator.store.keeping import ReplicaRequest
from orchestrator.store.records import JobHead
from orchestrator.weights.journal import Push, PushRecord

HEAD = JobHead(
    name="demo",
    run_id="1f3c9a2b00000000",
    directory=Path("/jobs/demo"),
    socket_dir=Path("/s"),
    phase="ready",
    reason="",
    created_at=1.0,
    phase_at=9.0,
    opened_at=5.0,
    stop_asked_at=None,
    drain_until=None,
    units=(),
)
PUSH = Push(version="step-1", source={}, strategy="barrier", in_flight="readmit", load_mode="gpu_fetch")
UPDATE = PushRecord(
    job="demo",
    run_id=HEAD.run_id,
    number=3,
    push=PUSH,
    asked_at=6.0,
    begun_at=None,
    outcome=None,
    why="",
    ended_at=None,
    is_cancelled=False,
)
REQUEST = ReplicaRequest(
    job="demo",
    run_id=HEAD.run_id,
    number=5,
    kind="restart",
    unit="decode-0",
    why="by request",
    is_forced=False,
    life="a",
    replicas=None,
    asked_at=6.0,
    begun_at=None,
    outcome=None,
    note="",
    ended_at=None,
)


def told(found: Operation | None) -> tuple[str, str, float | None]:
    assert found is not None
    return found.state, found.text, found.ended_at


@pytest.mark.parametrize("text", ["demo:1f3c9a2b:start", "demo:1f3c9a2b:stop", "a-1:run-1:update:3", "a:b:request:12"])
def test_an_id_is_read_as_it_was_written(text: str) -> None:
    assert str(read_id(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "demo", "demo:1f3c9a2b", "demo:1f3c9a2b:start:1", "demo:1f3c9a2b:update", "demo:1f3c9a2b:update:0"),
        "demo:1f3c9a2b0:stop",
        "DEMO:a:stop",
        "demo:a:update:" + "9" * 30,
        "demo:a:update:١",
        "demo:a:stop\n",
        ":a:stop",
    ],
)
def test_what_is_no_id(text: str) -> None:
    assert read_id(text) is None


def test_an_id_names_its_run() -> None:
    assert id_of("demo", HEAD.run_id, "update", 3) == OperationId(job="demo", run="1f3c9a2b", record="update", number=3)
    assert str(newest_of_run(HEAD)) == "demo:1f3c9a2b:start"
    assert str(newest_of_run(replace(HEAD, stop_asked_at=7.0))) == "demo:1f3c9a2b:stop"


@pytest.mark.parametrize(
    ("changes", "driven", "expected"),
    [
        ({"phase": "starting"}, True, ("running", "0 processes were started, 0 are ready", None)),
        ({"phase": "failed", "reason": "router died"}, False, ("failed", "router died", 9.0)),
        ({"phase": "stopping"}, True, ("running", "what was started is being ended", None)),
        ({"phase": "stopped"}, False, ("cancelled", "the job was stopped", 9.0)),
        ({"phase": "failed", "opened_at": 5.0}, False, ("succeeded", "the job has come up", 5.0)),
    ],
)
def test_a_start(changes: dict[str, Any], driven: bool, expected: object) -> None:
    assert told(start_of(replace(HEAD, **{"opened_at": None, **changes}), driven=driven)) == expected


def test_a_start_whose_driver_is_gone_says_so() -> None:
    found = start_of(replace(HEAD, opened_at=None, phase="starting"), driven=False)
    assert (found.state, "whoever was starting the job is gone" in found.text) == ("running", True)


def test_a_stop() -> None:
    assert stop_of(HEAD, driven=False) is None
    asked = replace(HEAD, phase="stopping", stop_asked_at=7.0)
    assert told(stop_of(asked, driven=True)) == ("running", "processes are being ended", None)
    drains = replace(asked, drain_until=8.0)
    assert told(stop_of(drains, driven=True)) == ("running", "open requests finish, then processes are ended", None)
    assert told(stop_of(replace(asked, phase="stopped"), driven=False)) == (
        "succeeded",
        "all its processes have ended",
        9.0,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("pending", "whoever supervises the job begins it", None)),
        ({"begun_at": 6.5}, ("running", "begun", None)),
        ({"begun_at": 6.5, "is_cancelled": True}, ("running", "begun; somebody asked that it ends", None)),
        ({"outcome": "committed", "ended_at": 8.0}, ("succeeded", "version step-1 is served", 8.0)),
        ({"outcome": "rolled_back", "why": "decode-0: torn", "ended_at": 8.0}, ("failed", "decode-0: torn", 8.0)),
        ({"outcome": "refused", "why": "too late", "ended_at": 8.0}, ("refused", "too late", 8.0)),
        ({"outcome": "cancelled", "why": "by request", "ended_at": 8.0}, ("cancelled", "by request", 8.0)),
    ],
)
def test_an_update(changes: dict[str, Any], expected: object) -> None:
    assert told(update_of(replace(UPDATE, **changes), None)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("pending", "its turn has not come", None)),
        ({"begun_at": 6.5}, ("running", "it is being carried out; by request", None)),
        ({"begun_at": 6.5, "outcome": "done", "ended_at": 8.0}, ("succeeded", "done", 8.0)),
        ({"outcome": "refused", "note": "no pair", "ended_at": 8.0}, ("refused", "no pair", 8.0)),
        ({"outcome": "cancelled", "note": "by request", "ended_at": 8.0}, ("cancelled", "by request", 8.0)),
    ],
)
def test_a_request(changes: dict[str, Any], expected: object) -> None:
    found = request_of(replace(REQUEST, **changes))
    assert told(found) == expected
    assert (found.kind, found.target, found.url) == ("restart", "decode-0", "/jobs/demo/requests/5")


def test_what_can_be_cancelled() -> None:
    starts = start_of(replace(HEAD, phase="starting", opened_at=None), driven=True)
    assert past_cancelling(starts, None) == ""
    assert past_cancelling(update_of(UPDATE, None), None) == ""
    assert past_cancelling(request_of(REQUEST), None) == ""
    assert "has ended: succeeded" in past_cancelling(start_of(HEAD, driven=False), None)
    assert "was begun" in past_cancelling(request_of(replace(REQUEST, begun_at=7.0)), None)
    stops = stop_of(replace(HEAD, phase="stopping", stop_asked_at=7.0), driven=True)
    assert stops is not None
    assert "does not come back" in past_cancelling(stops, None)
