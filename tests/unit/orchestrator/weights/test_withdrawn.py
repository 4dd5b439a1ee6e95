"""Engines that somebody wants without requests: drained, left alone, and joined again once they are wanted."""

from __future__ import annotations

from typing import Literal, get_args

import pytest

from orchestrator.errors import UpdateRefused
from orchestrator.spec.weights import Strategy
from orchestrator.weights import acts, events
from orchestrator.weights.words import Ended, Phase
from tests.unit.orchestrator.weights.driver import Driver

NAME = "decode-3"


def withdraw(drive: Driver, *names: str) -> None:
    drive.step(events.Withdrawn(names=frozenset(names)))


def idle(drive: Driver) -> Driver:
    drive.run(until=lambda: not drive.wire)
    return drive


def test_a_withdrawn_engine_is_drained_and_stays_so() -> None:
    drive = idle(Driver())
    withdraw(drive, NAME)
    idle(drive)
    assert drive.router.replicas[NAME].draining
    assert [each.ask for each in drive.sent(acts.Drain)] == [acts.Drain(name=NAME, draining=True, timeout_s=0.0)]
    assert drive.coordinator.position.course is None
    assert drive.router.has_pair()


def test_a_machine_that_was_rebuilt_drains_it_again_where_another_router_came_up() -> None:
    drive = idle(Driver())
    withdraw(drive, NAME)
    idle(drive)
    drive.router.boot()
    drive.start()
    withdraw(drive, NAME)
    drive.step(events.RouterCameUp())
    drive.run(until=lambda: drive.router.gate == "open" and drive.coordinator.position.course is None)
    assert drive.router.replicas[NAME].draining
    assert NAME not in {engine.name for engine, _ in drive.router.serving()}


def test_one_that_is_wanted_again_serves_what_it_holds_without_a_load() -> None:
    drive = idle(Driver())
    withdraw(drive, NAME)
    idle(drive)
    withdraw(drive)
    drive.run()
    assert (drive.loaded(), drive.holds()) == ([], {("v0", 1, False)})
    assert NAME in {engine.name for engine, _ in drive.router.serving()}


def test_the_rest_must_be_enough_for_a_rolling_update() -> None:
    drive = idle(Driver())
    withdraw(drive, NAME)
    with pytest.raises(UpdateRefused, match="this fleet has 2 prefill, 1 decode"):
        drive.update(strategy="rolling")


@pytest.mark.parametrize(
    ("strategy", "moment"), [("barrier", "before"), ("barrier", "load"), ("rolling", "drain"), ("rolling", "load")]
)
def test_an_update_leaves_it_out_and_it_loads_the_version_once_it_is_wanted(
    strategy: Strategy, moment: Phase | Literal["before"]
) -> None:
    drive = idle(Driver())
    if moment == "before":
        withdraw(drive, NAME)
    drive.update(strategy=strategy)
    if moment != "before":
        drive.run_to(moment)
        withdraw(drive, NAME)
    drive.run()
    assert drive.outcomes() == ["committed"]
    assert drive.restarted() == []
    served = {engine.name: (engine.weights, epoch) for engine, epoch in drive.router.serving()}
    assert set(served.values()) == {("v1", 2)}
    assert NAME not in served
    withdraw(drive)
    drive.run()
    assert drive.holds() == {("v1", 2, False)}
    assert NAME in {engine.name for engine, _ in drive.router.serving()}


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_without_a_pair_no_update_is_begun(strategy: Strategy) -> None:
    drive = idle(Driver(("prefill", "decode")))
    withdraw(drive, "decode-1")
    with pytest.raises(UpdateRefused, match="no pair of engines is left to load .*: decode-1"):
        drive.update(strategy=strategy)
    assert drive.coordinator.position.course is None


def without_a_pair() -> Driver:
    """In an update whose only decode engine was withdrawn after it had begun."""
    drive = Driver(("prefill", "decode"))
    drive.update()
    drive.run_to("load")
    withdraw(drive, "decode-1")
    return idle(drive)


def test_a_cancelled_update_that_nobody_can_bring_back_ends_at_once() -> None:
    drive = without_a_pair()
    asked_at = drive.now
    drive.cancel()
    drive.run(until=lambda: drive.outcomes() != [])
    assert (drive.outcomes(), drive.now, drive.restarted()) == (["fenced"], asked_at, [])
    assert drive.journal[-1].ended == Ended(update=1, outcome="fenced", why="by request; no pair of engines holds v0")
    withdraw(drive)
    drive.run()
    assert (drive.router.gate, drive.holds()) == ("open", {("v0", 1, False)})


def test_an_update_that_lacks_one_that_is_wanted_again_goes_on() -> None:
    drive = without_a_pair()
    withdraw(drive)
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 2, False)})


def test_those_that_are_in_the_epoch_of_a_cancelled_rolling_update_are_led_to_a_later_one() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run(until=lambda: drive.router.replicas["decode-2"].epoch == 2)
    withdraw(drive, "prefill-0", "decode-2")
    drive.cancel()
    drive.run(until=lambda: drive.said() != [])
    assert drive.router.has_pair()
    withdraw(drive)
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 3, False)})
    assert {engine.name for engine, _ in drive.router.serving()} == set(drive.engines)


def test_one_that_is_restarted_meanwhile_comes_back_withdrawn() -> None:
    drive = idle(Driver())
    withdraw(drive, NAME)
    idle(drive)
    drive.engines[NAME].end()
    drive.step(events.EngineEnded(name=NAME))
    drive.boot(NAME)
    drive.run(until=lambda: not drive.wire)
    assert NAME not in {engine.name for engine, _ in drive.router.serving()}
    withdraw(drive)
    drive.run()
    assert drive.loaded() == [(NAME, "v0")]
    assert drive.holds() == {("v0", 1, False)}
