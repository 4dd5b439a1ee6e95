"""Events: numbered, kept as long as they may be, and written with what they tell of."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.unit import UnitRecord
from orchestrator.store import events
from orchestrator.store.database import Database
from orchestrator.store.events import LONGEST_TEXT, Event, EventStore, StoredEvent, note
from orchestrator.store.updates import EndedUpdate, StoredRemark
from tests.fakes.fake_launch import NOW, FakeFleet


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path)


def told(fleet: FakeFleet) -> list[tuple[str, str]]:
    return [(each.event.kind, each.event.text) for each in fleet.store.events.since(0, 1000, "demo")]


def remark(text: str) -> Event:
    return Event(kind="remark", text=text)


def texts(found: list[StoredEvent]) -> list[str]:
    return [each.event.text for each in found]


def test_a_cursor_leads_through_all_events_or_those_of_one_job(database: Database) -> None:
    store = EventStore(database)
    for number in range(6):
        store.note("odd" if number % 2 else "even", remark(str(number)))
    page = store.since(0, 4)
    assert (texts(page), texts(store.since(page[-1].seq, 4))) == (["0", "1", "2", "3"], ["4", "5"])
    assert texts(store.since(page[-1].seq, 4, "odd")) == ["5"]
    assert (texts(store.newest(2)), texts(store.newest(2, "even"))) == (["4", "5"], ["2", "4"])
    assert store.since(store.newest_seq(), 4) == []
    assert (EventStore(database).since(0, 4, "nobody"), store.newest_seq()) == ([], 6)


def test_an_event_comes_back_as_it_was_noted(database: Database) -> None:
    store = EventStore(database)
    event = Event(kind="gate", text="ä" * LONGEST_TEXT, process="router", data={"gate": "open", "n": [1, None]})
    store.note("demo", event)
    assert store.newest(1)[0].event == event
    store.note("demo", remark("x" * LONGEST_TEXT + "and more"))
    assert texts(store.newest(1)) == ["x" * LONGEST_TEXT]


@pytest.mark.parametrize("job", ["noisy", "quiet"])
def test_only_the_newest_of_each_job_are_kept(database: Database, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setattr(events, "KEPT_PER_JOB", 3)
    monkeypatch.setattr(events, "PRUNED_EVERY", 1)
    store = EventStore(database)
    for number in range(8):
        store.note("noisy", remark(str(number)))
        if number < 3:
            store.note("quiet", remark(str(number)))
    assert texts(store.since(0, 100, job)) == (["5", "6", "7"] if job == "noisy" else ["0", "1", "2"])


def test_old_ones_go_a_few_at_a_time_and_no_number_is_given_twice(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PRUNED_BY_AGE", 4)
    store = EventStore(database)
    with database.transaction() as connection:
        for number in range(6):
            note(connection, "gone", remark(str(number)), NOW)
    monkeypatch.setattr(events, "PRUNED_EVERY", 1)
    later = NOW + events.KEPT_S + 1
    for left in (["4", "5"], []):
        with database.transaction() as connection:
            note(connection, "demo", remark("new"), later)
        assert texts(store.since(0, 100, "gone")) == left
    with database.transaction() as connection:
        connection.execute("DELETE FROM events")
        note(connection, "demo", remark("newest"), later)
    assert store.newest_seq() == 9


def test_a_life_is_told_as_it_is_recorded(fleet: FakeFleet) -> None:
    job = fleet.running()
    fleet.store.add_unit("demo", job.run_id, UnitRecord(**{**vars(job.records[0]), "pid": 7}), NOW)
    fleet.store.set_phase("demo", job.run_id, "degraded", "no pool\nsecond\nthird", NOW)
    fleet.store.set_phase("demo", job.run_id, "degraded", "no pool\nsecond\nthird", NOW + 1)
    fleet.service().stop("demo")
    found = told(fleet)
    first, names = job.records[0].name, [record.name for record in job.records]
    assert found[0] == ("job_phase", "starting")
    assert found[1] == ("process_started", f"{first} was started as pid {job.records[0].pid}")
    assert {text for kind, text in found if kind == "process_ready"} == {f"{name} is ready" for name in names}
    after = found[found.index(("job_phase", "ready")) + 1 :]
    assert after[:3] == [
        ("process_restarted", f"{first} was started again as pid 7"),
        ("job_phase", "degraded: no pool; second"),
        ("job_phase", "stopping"),
    ]
    assert [kind for kind, _ in after[3:-1]] == ["process_ended"] * (len(names) - 1), "pid 7 never was"
    assert after[-1] == ("job_phase", "stopped")


def test_a_change_that_is_not_made_is_not_told(fleet: FakeFleet) -> None:
    fleet.record()
    before = told(fleet)
    fleet.store.set_phase("demo", "run-0", "ready", "", NOW)
    fleet.store.set_ready("demo", "run-1", "nobody", NOW)
    with suppress(KeyError), fleet.database.transaction() as connection:
        note(connection, "demo", remark("half a change"), NOW)
        raise KeyError
    assert told(fleet) == before


def test_an_update_is_told_from_its_wish_to_its_end_and_the_end_once(fleet: FakeFleet) -> None:
    fleet.record()
    fleet.store.set_phase("demo", "run-1", "ready", "", NOW)
    updates = fleet.updates
    generation = updates.take_over("demo", "run-1")
    updates.ask("demo", "run-1", '{"source": {"token": "hunter2"}}', NOW)
    for _ in range(2):
        updates.cancel("demo", 1)
    updates.remark("demo", StoredRemark(text="slow", at=NOW))
    for _ in range(2):
        ended = EndedUpdate(number=1, outcome="rolled_back", why="no bytes", at=NOW)
        updates.record("demo", "run-1", generation, "position", ended)
    assert told(fleet)[2:] == [
        ("update_asked", "update 1 was asked for"),
        ("update_cancel_asked", "somebody asked that update 1 ends"),
        ("remark", "slow"),
        ("update_ended", "update 1: rolled_back: no bytes"),
    ]


def test_no_secret_of_a_job_is_told(fleet: FakeFleet) -> None:
    """Neither the token of its engines, nor their environment, nor what a log says beyond the cause of an end."""
    fleet.machine.log_text = "ValueError: no such model\napi_key=hunter2\n"
    service = fleet.service()
    admission = service.admit(fleet.spec())
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, 1) if name == "decode-0" else None
    with pytest.raises(Exception, match="hunter2"):
        service.drive(admission, fleet.shown.append)
    token = Path(admission.job.plan.router.token_file).read_text().strip()
    all_told = json.dumps([[each.event.text, dict(each.event.data)] for each in fleet.store.events.since(0, 1000)])
    assert "failed: decode-0 ended with exit code 1" in all_told
    assert "cause: ValueError: no such model" in all_told
    assert token not in all_told
    assert "hunter2" not in all_told
