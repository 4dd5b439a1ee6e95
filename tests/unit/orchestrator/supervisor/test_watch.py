"""What a watch sees of processes on a machine that runs none, and which it starts again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.driver_lock import DriverLock
from orchestrator.supervisor.watch import UnitNews, Watch
from tests.fakes.fake_launch import FakeFleet

DECODE_ENDED = UnitNews(unit="decode-0", what="ended")
DECODE_READY = UnitNews(unit="decode-0", what="ready")


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    fleet = FakeFleet(tmp_path)
    fleet.running()
    return fleet


@pytest.fixture
def watch(fleet: FakeFleet) -> Watch:
    return new_watch(fleet)


def new_watch(fleet: FakeFleet) -> Watch:
    job = fleet.store.get("demo")
    return Watch(
        store=fleet.store, backend=fleet.backend(), probe=fleet.probe, job=job, units=("prefill-0", "decode-0")
    )


def looks_until(watch: Watch, condition: Callable[[], bool]) -> list[UnitNews]:
    news: list[UnitNews] = []
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, news
        news += watch.look()
        time.sleep(0.002)
    return news


def restarted(fleet: FakeFleet, watch: Watch) -> list[UnitNews]:
    """Until another life of the decode engine is recorded."""
    before = fleet.store.get("demo").records
    watch.restart("decode-0")
    return looks_until(watch, lambda: fleet.store.get("demo").records != before)


def is_up(fleet: FakeFleet, name: str) -> bool:
    stored = next(unit for unit in fleet.store.get("demo").units if unit.record.name == name)
    return name in fleet.machine.names() and stored.ready_at is not None


def test_nothing_is_said_while_nothing_changes(watch: Watch) -> None:
    assert [*watch.look(), *watch.look()] == []


def test_an_end_is_said_once_and_nothing_is_started_unasked(fleet: FakeFleet, watch: Watch) -> None:
    assert list(watch.look()) == []
    fleet.machine.kill("decode-0")
    assert list(watch.look()) == [DECODE_ENDED]
    assert fleet.machine.started.count("decode-0") == 1


def test_one_that_is_not_watched_is_nobodys_business(fleet: FakeFleet, watch: Watch) -> None:
    fleet.machine.kill("router")
    assert list(watch.look()) == []


def test_a_restart_ends_what_is_left_of_the_old_life(fleet: FakeFleet, watch: Watch) -> None:
    assert list(watch.look()) == []
    news = restarted(fleet, watch)
    news += looks_until(watch, lambda: is_up(fleet, "decode-0"))
    assert ("decode-0",) in fleet.machine.stopped
    assert fleet.machine.names().count("decode-0") == 1
    assert news == [DECODE_ENDED, DECODE_READY]


def test_a_life_that_is_still_coming_up_is_left_alone(fleet: FakeFleet, watch: Watch) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    for _ in range(3):
        watch.restart("decode-0")
        looks_until(watch, lambda: not watch_is_busy(watch))
    fleet.probe.never_ready = set()
    looks_until(watch, lambda: is_up(fleet, "decode-0"))
    assert fleet.machine.started.count("decode-0") == 2


def test_a_life_that_is_given_up_as_soon_as_it_is_ready_is_ended(fleet: FakeFleet, watch: Watch) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    successor = new_watch(fleet)
    assert list(successor.look()) == [DECODE_ENDED]
    fleet.probe.never_ready = set()
    for news in successor.look():
        assert news == DECODE_READY
        successor.restart("decode-0")
    looks_until(successor, lambda: fleet.machine.started.count("decode-0") == 3)


def watch_is_busy(watch: Watch) -> bool:
    list(watch.look())
    return bool(watch.waiting)


def test_whoever_begins_to_watch_says_who_is_not_ready(fleet: FakeFleet, watch: Watch) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    successor = new_watch(fleet)
    assert list(successor.look()) == [DECODE_ENDED]
    fleet.probe.never_ready = set()
    assert list(successor.look()) == [DECODE_READY]


def test_one_that_ends_before_it_is_ready_is_started_again(fleet: FakeFleet, watch: Watch) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    fleet.machine.kill("decode-0")
    fleet.probe.never_ready = set()
    looks_until(watch, lambda: fleet.machine.started.count("decode-0") == 3 and is_up(fleet, "decode-0"))


def test_a_job_that_is_being_stopped_starts_nothing(fleet: FakeFleet, watch: Watch) -> None:
    fleet.service().begin_stop("demo")
    watch.restart("decode-0")
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        list(watch.look())
    assert fleet.machine.started.count("decode-0") == 1


def test_a_driver_goes_first(fleet: FakeFleet, watch: Watch) -> None:
    lock = DriverLock(fleet.store.folder("demo"))
    assert lock.acquire()
    watch.restart("decode-0")
    for _ in range(20):
        list(watch.look())
    assert fleet.machine.started.count("decode-0") == 1
    lock.release()
    looks_until(watch, lambda: fleet.machine.started.count("decode-0") == 2)
