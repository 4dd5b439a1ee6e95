"""Events over HTTP: pages behind a cursor, and streams that miss nothing, cost little and end with the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api import routes_events
from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.store.events import Event, EventStore, StoredEvent
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import signed_in


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    fleet = FakeFleet(tmp_path)
    fleet.record()
    return fleet


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    with signed_in(serve(build_app(fleet.service(), Access({"a-token": "admin"}))), "a-token") as client:
        yield client


def note(fleet: FakeFleet, job: str, *texts: str) -> None:
    for text in texts:
        fleet.store.events.note(job, Event(kind="remark", text=text))


def texts(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [event["text"] for event in reply.json()["events"]]


class Stream:
    """Reads Server-Sent Events as they come."""

    def __init__(self, reply: httpx.Response) -> None:
        assert reply.headers["content-type"].startswith("text/event-stream")
        self._lines = reply.iter_lines()

    def next(self) -> tuple[str, dict[str, Any]]:
        """The id and the event of the next one."""
        fields: dict[str, str] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                break
            else:
                fields = {}
        return fields["id"], json.loads(fields["data"])


@contextmanager
def stream(api: httpx.Client, path: str, **given: Any) -> Iterator[Stream]:
    with api.stream("GET", path, **given) as reply:
        yield Stream(reply)


def test_pages_lead_from_the_first_event_to_the_newest(fleet: FakeFleet, api: httpx.Client) -> None:
    note(fleet, "demo", "a", "b", "c")
    note(fleet, "other", "d")
    assert texts(api.get("/events")) == ["starting", "a", "b", "c", "d"]
    assert texts(api.get("/jobs/demo/events", params={"limit": 2})) == ["b", "c"]
    first = api.get("/jobs/demo/events", params={"since": 0, "limit": 2})
    assert texts(first) == ["starting", "a"]
    second = api.get("/jobs/demo/events", params={"since": first.json()["next"]})
    assert texts(second) == ["b", "c"]
    end = api.get("/jobs/demo/events", params={"since": second.json()["next"]}).json()
    assert end == {"events": [], "next": second.json()["next"]}


def test_an_event_says_when_where_and_what(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.store.events.note(
        "demo", Event(kind="gate", process="router", text="the gate is open", data={"gate": "open"})
    )
    event = api.get("/events").json()["events"][-1]
    assert time.time() - event.pop("at") < 60
    assert event == {
        "seq": 2,
        "job": "demo",
        "process": "router",
        "kind": "gate",
        "text": "the gate is open",
        "data": {"gate": "open"},
    }
    assert api.get("/jobs/demo").json()["events"][-1]["seq"] == 2


@pytest.mark.parametrize("path", ["/jobs/nobody/events", "/jobs/nobody/events/stream"])
def test_an_unknown_job_has_none(api: httpx.Client, path: str) -> None:
    assert api.get(path).status_code == 404


@pytest.mark.parametrize("wrong", [{"since": -1}, {"since": 2**63}, {"since": "x"}, {"limit": 0}, {"limit": 1001}])
def test_a_cursor_that_is_none_is_refused(api: httpx.Client, wrong: dict[str, Any]) -> None:
    assert api.get("/events", params=wrong).status_code == 422


def test_a_stream_tells_what_happens_from_now_on(fleet: FakeFleet, api: httpx.Client) -> None:
    with stream(api, "/jobs/demo/events/stream") as events:
        note(fleet, "other", "not this")
        note(fleet, "demo", "two\nlines")
        seq, event = events.next()
        assert (seq, event["text"]) == (str(event["seq"]), "two\nlines")
        # As another process writes it.
        EventStore(fleet.database).note("demo", Event(kind="remark", text="next"))
        assert events.next()[1]["text"] == "next"


def test_whoever_connects_again_goes_on_where_it_was(fleet: FakeFleet, api: httpx.Client) -> None:
    note(fleet, "demo", *map(str, range(5)))
    with stream(api, "/events/stream", params={"since": 0}) as events:
        seen = [events.next() for _ in range(3)]
    with stream(api, "/events/stream", params={"since": 0}, headers={"last-event-id": seen[-1][0]}) as events:
        seen += [events.next() for _ in range(3)]
    assert [event["text"] for _, event in seen] == ["starting", "0", "1", "2", "3", "4"]


def test_a_quiet_stream_beats(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_events, "BEATS_EVERY_S", 0.05)
    with api.stream("GET", "/events/stream") as reply:
        assert next(line for line in reply.iter_lines() if line).startswith(": ping")


def test_a_reader_that_stands_still_has_no_more_read_for_it(
    fleet: FakeFleet, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is on record than sockets and buffers hold."""
    with fleet.database.transaction() as connection:
        connection.executemany(
            "INSERT INTO events (at, job, process, kind, text, data) VALUES (0, 'demo', '', 'remark', ?, '{}')",
            [["x" * 400]] * 50_000,
        )
    asked: list[int] = []
    since = EventStore.since

    def counted(store: EventStore, seq: int, limit: int, job: str | None = None) -> list[StoredEvent]:
        asked.append(seq)
        return since(store, seq, limit, job)

    monkeypatch.setattr(EventStore, "since", counted)
    with stream(api, "/events/stream", params={"since": 0}) as events:
        assert events.next()[1]["text"] == "starting"
        before = -1
        while before != len(asked):
            before = len(asked)
            threading.Event().wait(0.5)
        assert len(asked) < 50_000 / routes_events.PAGE / 2
        assert events.next()[0] == "2"
