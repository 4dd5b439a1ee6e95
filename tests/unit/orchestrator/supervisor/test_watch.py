"""What a watch sees of processes on a machine that runs none, and which it starts again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deploy.probe import ProbeResult
from deploy.unit import Probe
from orchestrator.store.keeping import life_of
from orchestrator.store.locks import DriverLock
from orchestrator.supervisor import restarts
from orchestrator.supervisor.restarts import RestartPolicy
from orchestrator.supervisor.watch import UnitNews, Watch
from tests.fakes.fake_launch import FakeFleet

DECODE_AWAITED = UnitNews(unit="decode-0", what="awaited")
DECODE_ENDED = UnitNews(unit="decode-0", what="ended")
UNITS = ("mooncake-master", "storage-prefill-0", "prefill-0", "decode-0", "router")
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
    return Watch(store=fleet.store, keeping=fleet.keeping, backend=fleet.backend(), probe=fleet.probe, job=job)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> RestartPolicy:
    """Of engines."""
    policy = RestartPolicy(first_pause_s=0.001, longest_pause_s=0.001, steady_s=30.0, budget=4)
    monkeypatch.setattr(restarts, "POLICIES", {**restarts.POLICIES, "engine": policy})
    return policy


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
    list(watch.look())
    watch.restart("decode-0", "it cannot be used")
    return looks_until(watch, lambda: fleet.store.get("demo").records != before)


def is_up(fleet: FakeFleet, name: str) -> bool:
    stored = next(unit for unit in fleet.store.get("demo").units if unit.record.name == name)
    return name in fleet.machine.names() and stored.ready_at is not None


def test_nothing_is_said_while_nothing_changes(watch: Watch) -> None:
    assert [*watch.look(), *watch.look()] == []


@pytest.mark.parametrize("name", UNITS)
def test_whatever_ends_is_said_once_and_started_again(fleet: FakeFleet, watch: Watch, name: str) -> None:
    assert list(watch.look()) == []
    before = fleet.store.get("demo").records
    fleet.machine.kill(name)
    news = looks_until(watch, lambda: fleet.store.get("demo").records != before and is_up(fleet, name))
    news += watch.look()
    assert [(each.unit, each.what) for each in news] == [(name, "ended"), (name, "ready")]
    assert [end.cause for end in fleet.keeping.ends("demo")[name]] == ["ended by signal 9"]


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
        watch.restart("decode-0", "it cannot be used")
        list(watch.look())
    fleet.probe.never_ready = set()
    looks_until(watch, lambda: is_up(fleet, "decode-0"))
    assert fleet.machine.started.count("decode-0") == 2


def test_a_life_that_is_given_up_as_soon_as_it_is_ready_is_ended(fleet: FakeFleet, watch: Watch) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    successor = new_watch(fleet)
    assert list(successor.look()) == [DECODE_AWAITED]
    fleet.probe.never_ready = set()
    for news in successor.look():
        assert news == DECODE_READY
        successor.restart("decode-0", "it cannot be used")
    looks_until(successor, lambda: fleet.machine.started.count("decode-0") == 3)


def test_a_life_that_somebody_wants_replaced_is_ended_though_it_is_still_coming_up(
    fleet: FakeFleet, watch: Watch
) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    list(watch.look())
    asked = life_of(watch.units["decode-0"].record)
    for _ in range(3):
        watch.replace("decode-0", asked)
        looks_until(watch, lambda: fleet.machine.started.count("decode-0") == 3)
    assert fleet.keeping.ends("demo") == {}, "nobody is to blame"


def test_a_crash_loop_is_given_up_and_the_first_cause_is_known_to_whoever_watches_next(
    fleet: FakeFleet, watch: Watch, quick: RestartPolicy
) -> None:
    fleet.machine.log_text = "ValueError: a later symptom\n"
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, exit_code=1)
    fleet.machine.kill("decode-0", exit_code=3)
    looks_until(watch, lambda: "decode-0" in watch.given_up)
    assert fleet.machine.started.count("decode-0") == quick.budget
    for each in (watch, new_watch(fleet)):
        list(each.look())
        assert str(each.given_up["decode-0"]).endswith("at first: ended with exit code 3; its log says: last line")
    assert fleet.machine.started.count("decode-0") == quick.budget


def test_one_that_was_given_up_is_started_once_somebody_asks(
    fleet: FakeFleet, watch: Watch, quick: RestartPolicy
) -> None:
    fleet.machine.on_start = lambda name: fleet.machine.kill(name)
    fleet.machine.kill("decode-0")
    looks_until(watch, lambda: "decode-0" in watch.given_up)
    fleet.machine.on_start = lambda _name: None
    watch.replace("decode-0", life_of(watch.units["decode-0"].record))
    looks_until(watch, lambda: is_up(fleet, "decode-0"))
    assert watch.given_up == {}


def test_what_cannot_be_ended_is_not_started_beside_it(fleet: FakeFleet, watch: Watch, quick: RestartPolicy) -> None:
    fleet.machine.undying = {"decode-0"}
    list(watch.look())
    watch.restart("decode-0", "it cannot be used")
    looks_until(watch, lambda: "decode-0" in watch.given_up)
    assert fleet.machine.started.count("decode-0") == 1
    assert watch.row("decode-0").first_cause == "it cannot be used"


def test_whoever_begins_to_watch_says_who_is_not_ready(fleet: FakeFleet, watch: Watch) -> None:
    fleet.probe.never_ready = {"decode-0"}
    restarted(fleet, watch)
    successor = new_watch(fleet)
    assert list(successor.look()) == [DECODE_AWAITED]
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
    fleet.machine.kill("decode-0")
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        list(watch.look())
    assert fleet.machine.started.count("decode-0") == 1


def test_a_driver_goes_first(fleet: FakeFleet, watch: Watch) -> None:
    lock = DriverLock(fleet.store.folder("demo"))
    assert lock.acquire()
    fleet.machine.kill("decode-0")
    for _ in range(20):
        list(watch.look())
    assert fleet.machine.started.count("decode-0") == 1
    lock.release()
    looks_until(watch, lambda: fleet.machine.started.count("decode-0") == 2)


def test_a_start_that_fails_in_a_way_that_nobody_foresaw_is_the_end_of_a_life(
    fleet: FakeFleet, watch: Watch, quick: RestartPolicy
) -> None:
    fleet.machine.on_start = lambda _name: {}["broken"]
    fleet.machine.kill("decode-0")
    looks_until(watch, lambda: "decode-0" in watch.given_up)
    causes = [end.cause for end in fleet.keeping.ends("demo")["decode-0"]]
    assert causes[-1] == "it could not be started: unexpected KeyError: 'broken'"


def test_those_that_come_up_are_probed_side_by_side(fleet: FakeFleet) -> None:
    with fleet.database.transaction() as connection:
        connection.execute("UPDATE units SET ready_at = NULL")
    all_at_once = threading.Barrier(len(UNITS))

    def probe(_probe: Probe, _members: Sequence[int]) -> ProbeResult:
        all_at_once.wait(10)
        return ProbeResult(ready=True, detail="answers")

    watch = Watch(
        store=fleet.store, keeping=fleet.keeping, backend=fleet.backend(), probe=probe, job=fleet.store.get("demo")
    )
    assert {news.unit for news in watch.look() if news.what == "ready"} == set(UNITS)
