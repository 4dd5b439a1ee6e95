"""Rolling updates, and engines that come up."""

from __future__ import annotations

from operator import attrgetter

import pytest

from orchestrator.errors import UpdateRefused
from orchestrator.weights import acts, events
from orchestrator.weights.words import Phase
from tests.unit.orchestrator.weights.driver import Driver


def test_the_gate_stays_open_and_a_pair_always_serves() -> None:
    drive = Driver(("prefill", "prefill", "decode", "decode", "decode"))
    drive.update(strategy="rolling")
    drive.run(until=lambda: drive.outcomes() != [] or not drive.router.has_pair())
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 2, False)})
    assert {command.ask.gate for command in drive.sent(acts.SetGate) if isinstance(command.ask, acts.SetGate)} == {
        "open"
    }
    assert drive.sent(acts.HandleInFlight) == [], "requests run to their end where they are"


def test_a_group_is_drained_paused_loaded_verified_joined() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run()
    kinds = (acts.Drain, acts.Pause, acts.Load, acts.ConfirmEpoch, acts.PublishEpoch, acts.Resume)
    about = [
        type(command.ask)
        for command in drive.sent(*kinds)
        if "prefill-0" in (command.receiver, getattr(command.ask, "name", ""))
        or "prefill-0" in getattr(command.ask, "instances", ())
    ]
    assert about == [acts.Drain, *kinds, acts.Drain]


def test_a_group_gets_no_more_legs_before_any_of_it_is_waited_for() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run_to("pause_prefill")
    drains = [(ask.name, ask.timeout_s > 0) for ask in map(attrgetter("ask"), drive.sent(acts.Drain))]
    assert drains == [(name, is_waited) for is_waited in (False, True) for name in ("prefill-0", "decode-2")]


def test_everyone_has_its_copy_before_the_first_group_moves() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run_to("choose")
    assert {each.receiver for each in drive.sent(acts.Prefetch)} == set(drive.engines)
    assert drive.sent(acts.Pause) == []


def test_the_version_moves_after_the_last_group() -> None:
    """A28."""
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run(until=lambda: drive.journal[-1].committed.epoch == 2)
    assert drive.holds() == {("v1", 2, False)}


def test_a_fleet_too_small_is_refused_by_name() -> None:
    drive = Driver(("prefill", "decode", "decode"))
    with pytest.raises(UpdateRefused, match="this fleet has 1 prefill, 2 decode"):
        drive.update(strategy="rolling")
    assert drive.coordinator.position.last_update == 0


def test_a_later_group_that_fails_rolls_the_whole_fleet_back_to_a_new_epoch() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run(until=lambda: len(drive.loaded()) == 2)
    drive.load_ends["decode-3"] = "untouched"
    drive.run(until=lambda: drive.outcomes() != [] or not drive.router.has_pair())
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 3, False)})
    assert ("decode-3", "v0") not in drive.loaded(), "it held them still"
    told = {(ask.version, ask.epoch, ask.committed) for ask in map(attrgetter("ask"), drive.sent(acts.PublishEpoch))}
    assert told == {("v1", 2, 1), ("v0", 3, 1)}, "the router learns that v1 was given up"


def test_an_engine_that_comes_up_during_a_rolling_update_loads_its_target() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run_to("load")
    drive.engines["prefill-1"].end()
    drive.step(events.EngineEnded(name="prefill-1"))
    drive.boot("prefill-1")
    drive.run()
    assert [version for name, version in drive.loaded() if name == "prefill-1"] == ["v1"]
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 2, False)})


def test_an_engine_behind_the_same_port_serves_only_after_it_has_loaded_the_committed_version() -> None:
    """A41: it boots fenced, with the weights that are on the disk."""
    drive = Driver()
    drive.run(until=lambda: not drive.wire)
    drive.engines["decode-2"].end()
    drive.step(events.EngineEnded(name="decode-2"))
    drive.boot("decode-2")
    drive.run(until=lambda: drive.coordinator.position.course is not None)
    drive.run()
    assert drive.loaded() == [("decode-2", "v0")]
    about = [type(each.ask) for each in drive.sent(acts.Load, acts.ConfirmEpoch) if each.receiver == "decode-2"]
    assert about == [acts.ConfirmEpoch, acts.Load, acts.ConfirmEpoch]
    assert (drive.outcomes(), drive.holds()) == ([], {("v0", 1, False)})


@pytest.mark.parametrize("phase", ["prefetch", "drain", "pause_prefill", "pause_decode"])
def test_an_update_that_is_cancelled_before_a_load_leaves_the_fleet_in_its_epoch(phase: Phase) -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run_to(phase)
    drive.cancel()
    drive.run()
    assert (drive.outcomes(), drive.holds(), drive.loaded()) == (["cancelled"], {("v0", 1, False)}, [])
    assert not any(replica.draining for replica in drive.router.replicas.values())


def test_an_update_that_is_cancelled_between_two_groups_goes_back() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run_to("admit")
    drive.cancel()
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 3, False)})


def test_a_drain_that_comes_late_takes_no_pair_away() -> None:
    drive = Driver()
    drive.update(strategy="rolling")
    drive.run(until=lambda: len(drive.loaded()) == 2)
    drive.run(until=lambda: any(isinstance(each.ask, acts.Drain) and each.ask.draining for each in drive.wire))
    late = next(each for each in drive.wire if isinstance(each.ask, acts.Drain))
    drive.wire.clear()
    drive.cancel()
    drive.run(until=lambda: acts.ReadRouter not in {type(each.ask) for each in drive.wire})
    drive.answer(late)
    drive.run(until=lambda: drive.outcomes() != [] or not drive.router.has_pair())
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 3, False)})


def test_a_drain_that_comes_late_keeps_nobody_out() -> None:
    """An update takes the place of a join, whose drain arrives after the router was read back."""
    drive = Driver()
    drive.run(until=lambda: not drive.wire)
    drive.engines["decode-2"].end()
    drive.step(events.EngineEnded(name="decode-2"))
    drive.boot("decode-2")
    drive.run_to("drain")
    late = next(each for each in drive.wire if isinstance(each.ask, acts.Drain))
    drive.wire.clear()
    drive.update()
    drive.run(until=lambda: acts.ReadRouter not in {type(each.ask) for each in drive.wire})
    drive.answer(late)
    drive.run()
    assert drive.outcomes() == ["committed"]
    assert not any(replica.draining for replica in drive.router.replicas.values())


def test_a_router_that_comes_up_is_told_the_epoch_again_and_opened() -> None:
    drive = Driver()
    drive.run(until=lambda: not drive.wire)
    drive.router.boot()
    drive.step(events.RouterCameUp())
    drive.run(until=lambda: drive.router.gate == "open")
    assert drive.router.has_pair()
    assert drive.loaded() == []
