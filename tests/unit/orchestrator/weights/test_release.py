"""When a trainer hears that no engine reads its memory any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.weights import acts, events
from tests.unit.orchestrator.weights.driver import TWO_PAIRS, Driver


def released(drive: Driver) -> list[str]:
    """Which versions, in order."""
    return [each.ask.source["version"] for each in drive.sent(acts.Release) if isinstance(each.ask, acts.Release)]


def committed(drive: Driver) -> None:
    drive.run()


def called_off(drive: Driver) -> None:
    drive.load_ends = dict.fromkeys(drive.engines, "untouched")
    drive.run()


def cancelled(drive: Driver) -> None:
    drive.run_to("hold")
    drive.cancel()
    drive.run()


def rolled_back(drive: Driver) -> None:
    drive.load_ends["decode-1"] = "untouched"
    drive.run()


def fenced(drive: Driver) -> None:
    drive.load_ends = dict.fromkeys(drive.engines, "torn")
    drive.run(until=lambda: drive.outcomes() != [] and not drive.wire)


@pytest.mark.parametrize("goes", [committed, called_off, cancelled, rolled_back, fenced])
def test_once_the_update_has_ended_however_it_did(goes: Callable[[Driver], None]) -> None:
    drive = Driver(("prefill", "decode"))
    drive.update(transport="nixl")
    goes(drive)
    assert (drive.outcomes(), released(drive)) == ([goes.__name__], ["v1"])
    kinds = [type(act.ask) if isinstance(act, acts.Command) else type(act) for act in drive.done]
    assert kinds.index(acts.Finish) < kinds.index(acts.Release)


@pytest.mark.parametrize("strategy", ["barrier", "rolling"])
def test_not_before_every_engine_has_loaded(strategy: str) -> None:
    drive = Driver()
    drive.update(strategy=strategy, transport="nixl")  # type: ignore[arg-type]
    drive.run(until=lambda: released(drive) != [])
    assert {engine.weights for engine in drive.engines.values()} == {"v1"}


def test_a_version_that_lies_elsewhere_has_no_trainer_that_waits() -> None:
    drive = Driver()
    for version, transport in (("v1", "path"), ("v2", "store")):
        drive.update(version, transport=transport)
        drive.run()
    assert released(drive) == []


def test_an_engine_that_joins_later_releases_nobody() -> None:
    drive = Driver()
    drive.update(transport="nixl")
    drive.run()
    drive.done.clear()
    drive.engines["decode-2"].end()
    drive.step(events.EngineEnded(name="decode-2"))
    drive.boot("decode-2")
    drive.run(until=lambda: drive.coordinator.position.course is not None)
    drive.run()
    assert (drive.loaded(), released(drive)) == ([("decode-2", "v1")], [])


def test_a_coordinator_that_died_meanwhile_says_it_again() -> None:
    drive = Driver()
    drive.update(transport="nixl")
    drive.run(until=lambda: released(drive) != [])
    drive.start()
    drive.run()
    assert released(drive) == ["v1", "v1"]


def test_a_trainer_of_whom_nothing_is_heard_keeps_nobody_from_anything() -> None:
    drive = Driver(TWO_PAIRS)
    drive.silent.add((acts.TRAINER, acts.Release))
    drive.update(transport="nixl")
    drive.run()
    assert (drive.outcomes(), drive.router.gate) == (["committed"], "open")
    assert acts.TRAINER in drive.said()[0]
    assert drive.journal[-1].epochs == {2: "v1"}
