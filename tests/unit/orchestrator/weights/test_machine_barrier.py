"""A barrier update in the order of the design, and what becomes of it when something fails."""

from __future__ import annotations

from itertools import groupby
from typing import get_args

import pytest

from orchestrator.errors import UpdateRefused
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.weights import acts, events
from orchestrator.weights.words import Ended, Phase
from tests.unit.orchestrator.weights.driver import Driver


def test_the_order_of_a_barrier() -> None:
    """Prefetch before the hold; P paused, then frozen, then D; all verdicts before the commit; resume before open."""
    drive = Driver()
    drive.update()
    drive.run()
    told = []
    for command in drive.sent(acts.Prefetch, acts.SetGate, acts.HandleInFlight, acts.Pause, acts.Load):
        role = command.receiver.split("-")[0] if isinstance(command.ask, acts.Pause) else ""
        gate = command.ask.gate if isinstance(command.ask, acts.SetGate) else ""
        told.append(f"{type(command.ask).__name__} {role}{gate}".strip())
    assert [name for name, _ in groupby(told)] == [
        "Prefetch",
        "SetGate holding",
        "HandleInFlight",
        "Pause prefill",
        "SetGate frozen",
        "Pause decode",
        "Load",
        "SetGate open",
    ]
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 2, False)})


@pytest.mark.parametrize("mode", get_args(InFlightMode))
def test_handoffs_are_dropped_where_no_leg_is_left_to_read_them(mode: InFlightMode) -> None:
    drive = Driver()
    drive.update(mode=mode)
    drive.run()
    pauses = {
        each.receiver: each.ask.drops_handoffs for each in drive.sent(acts.Pause) if isinstance(each.ask, acts.Pause)
    }
    assert pauses == {name: name.startswith("prefill") and mode != "keep" for name in drive.engines}


def test_the_commit_is_recorded_after_all_verdicts_and_before_any_engine_is_confirmed() -> None:
    """Invariants 4 and 8; A28."""
    drive = Driver()
    drive.update()
    drive.run()
    kinds = [type(act.ask) if isinstance(act, acts.Command) else act for act in drive.done]
    commit = next(i for i, a in enumerate(kinds) if isinstance(a, acts.Record) and a.position.committed.epoch == 2)
    assert kinds[:commit].count(acts.Load) == 4
    assert acts.Load not in kinds[commit:]
    assert acts.ConfirmEpoch not in kinds[:commit]
    assert kinds.index(acts.PublishEpoch) < kinds.index(acts.Resume)


def test_every_command_follows_the_record_of_its_attempt() -> None:
    """Invariant 8: the journal is written before the act, and commands only become newer."""
    drive = Driver()
    drive.load_ends["decode-2"] = "torn"
    drive.update()
    drive.run()
    position, newest = drive.journal[0], None
    for act in drive.done:
        if isinstance(act, acts.Record):
            position = act.position
        elif isinstance(act, acts.Command):
            assert act.order[:2] == (position.last_update, position.attempt)
            assert newest is None or act.order > newest
            newest = act.order


def test_updates_that_follow_each_other_within_the_grace_time_leave_one_old_epoch_at_a_time() -> None:
    drive = Driver()
    for number in range(1, 6):
        drive.update(f"v{number}")
        drive.run_to("purge")
        drive.run(until=lambda: not drive.wire)
    assert (drive.now, sorted(drive.coordinator.position.epochs)) == (0.0, [5, 6])


def test_old_epochs_are_purged_after_the_grace_time() -> None:
    drive = Driver()
    drive.update()
    drive.run_to("purge")
    opened, outcomes = drive.now, drive.outcomes()
    drive.run()
    assert outcomes == ["committed"], "nobody waits for the purge"
    assert [command.ask for command in drive.sent(acts.Purge)] == [acts.Purge(epoch=1)]
    assert (drive.now, drive.journal[-1].epochs) == (opened + 20, {2: "v1"})


def test_a_pool_without_epochs_in_its_keys_is_wiped_once_while_everybody_is_paused() -> None:
    """A24: a stock store connector."""
    drive = Driver(wipes_pool=True)
    drive.update()
    drive.run(until=lambda: drive.sent(acts.Wipe) != [])
    assert drive.journal[-1].committed.epoch == 2, "what the pool has is given up once nobody needs it any more"
    assert {engine.paused for engine in drive.engines.values()} == {True}
    assert drive.router.gate == "frozen"
    drive.run_to("open")
    opened = drive.now
    drive.run()
    assert (drive.outcomes(), len(drive.sent(acts.Wipe)), drive.sent(acts.Purge)) == (["committed"], 1, [])
    assert (drive.now, drive.journal[-1].epochs) == (opened, {2: "v1"}), "there is nothing left to wait for"


def test_a_pool_that_is_not_wiped_in_time_keeps_nobody_from_serving() -> None:
    """Its keys are never read again: their salts are of older epochs."""
    drive = Driver(wipes_pool=True)
    drive.refusals[acts.POOL, acts.Wipe] = "12 keys are still in the pool"
    drive.update()
    drive.run()
    assert (drive.outcomes(), drive.restarted(), drive.router.gate) == (["committed"], [], "open")
    assert "older epochs stay in the pool" in drive.said()[0]
    assert set(drive.journal[-1].epochs) == {1, 2}
    drive.refusals.clear()
    drive.update("v2")
    drive.run()
    assert drive.journal[-1].epochs == {3: "v2"}


def test_a_pool_that_would_be_wiped_is_not_updated_by_rolling() -> None:
    drive = Driver(wipes_pool=True)
    with pytest.raises(UpdateRefused, match="kv_transfer_config"):
        drive.update(strategy="rolling")


def test_a_failed_load_moves_no_version_and_the_same_update_succeeds_later() -> None:
    """A28: one engine of four fails; the version stays, and the gate opens on one version only."""
    drive = Driver()
    drive.load_ends["decode-2"] = "torn"
    drive.update()
    drive.run_to("open")
    assert (drive.journal[-1].committed.version, drive.journal[-1].committed.epoch) == ("v0", 5)
    drive.load_ends.clear()
    drive.run(until=lambda: not drive.engines["decode-2"].is_up or drive.outcomes() != [])
    drive.boot("decode-2")
    drive.run()
    assert drive.outcomes() == ["rolled_back"]
    assert drive.journal[-1].ended is not None
    assert "decode-2: torn: no bytes" in drive.journal[-1].ended.why
    drive.update("v1")
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["rolled_back", "committed"], {("v1", 6, False)})


def test_a_torn_engine_loads_again_in_the_next_attempt() -> None:
    drive = Driver()
    drive.load_ends["decode-2"] = "torn"
    drive.update()
    drive.run(until=lambda: len(drive.loaded()) == 5)
    drive.load_ends.clear()
    drive.run()
    assert drive.loaded()[4:] == [("decode-2", "v1")], "the others hold it already"
    assert {command.order.attempt for command in drive.sent(acts.Load)} == {1, 2}
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 3, False)})


def test_rolling_back_relabels_whoever_is_untouched_and_reloads_the_others() -> None:
    drive = Driver()
    drive.load_ends["decode-2"] = "untouched"
    drive.update()
    drive.run()
    back = [name for name, version in drive.loaded() if version == "v0"]
    assert sorted(back) == ["decode-3", "prefill-0", "prefill-1"]
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 4, False)})


def test_where_nobody_was_touched_the_fleet_goes_on_in_its_epoch() -> None:
    drive = Driver()
    drive.load_ends = dict.fromkeys(drive.engines, "untouched")
    drive.update()
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["called_off"], {("v0", 1, False)})
    assert drive.router.gate == "open"
    assert drive.sent(acts.ConfirmEpoch, acts.PublishEpoch) == []


def test_where_neither_version_works_the_gate_stays_closed_until_engines_join() -> None:
    drive = Driver(("prefill", "decode"))
    drive.load_ends = dict.fromkeys(drive.engines, "torn")
    drive.update()
    drive.run(until=lambda: drive.outcomes() != [])
    assert (drive.outcomes(), drive.router.gate) == (["fenced"], "frozen")
    assert set(drive.restarted()) == set(drive.engines)
    drive.load_ends.clear()
    for name in drive.engines:
        drive.boot(name)
    drive.run()
    assert (drive.router.gate, drive.holds()) == ("open", {("v0", 1, False)})


def test_running_requests_that_do_not_end_call_the_update_off() -> None:
    drive = Driver()
    drive.refusals[acts.ROUTER, acts.HandleInFlight] = "these still run: a, b"
    drive.update()
    drive.run()
    assert (drive.outcomes(), drive.router.gate) == (["called_off"], "open")
    assert drive.sent(acts.Pause, acts.Load) == []


def test_nothing_is_aborted_once_an_engine_was_paused() -> None:
    """A27, also where the coordinator dies between pause and resume."""
    drive = Driver()
    drive.update()
    drive.run_to("pause_decode")
    drive.start()
    drive.run()
    kinds = [type(command.ask) for command in drive.sent(acts.HandleInFlight, acts.Pause)]
    assert kinds[0] is acts.HandleInFlight
    assert acts.HandleInFlight not in kinds[1:]
    assert drive.outcomes() == ["committed"]


@pytest.mark.parametrize("kind", [acts.Pause, acts.Resume])
def test_a_pause_or_resume_of_unknown_outcome_is_read_back(kind: type[acts.Ask]) -> None:
    drive = Driver()
    drive.silent.add(("prefill-0", kind))
    drive.update()
    drive.run(until=lambda: any(each.receiver == "prefill-0" for each in drive.sent(kind)))
    drive.run(until=lambda: not drive.wire)
    drive.silent.clear()
    drive.run()
    told = [type(each.ask) for each in drive.sent(kind, acts.ReadEngine) if each.receiver == "prefill-0"]
    assert told[told.index(kind) + 1] is acts.ReadEngine
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 2, False)})


def test_an_engine_that_does_not_answer_is_fenced_and_restarted_and_joins_later() -> None:
    drive = Driver()
    drive.update()
    drive.run_to("pause_prefill")
    drive.silent |= {("prefill-0", acts.Pause), ("prefill-0", acts.ReadEngine)}
    drive.run(until=lambda: drive.outcomes() != [])
    assert (drive.outcomes(), drive.restarted()) == (["committed"], ["prefill-0"])
    assert drive.router.replicas["prefill-0"].draining, "whoever did not arrive gets no legs"
    drive.silent.clear()
    drive.boot("prefill-0")
    drive.run(until=lambda: drive.coordinator.position.course is None and not drive.wire)
    assert drive.holds() == {("v1", 2, False)}
    assert not drive.router.replicas["prefill-0"].draining


def test_an_update_is_refused_while_another_is_under_way() -> None:
    drive = Driver()
    drive.update()
    with pytest.raises(UpdateRefused, match="update 1 is under way"):
        drive.update()
    drive.run_to("purge")
    drive.update("v2")
    drive.run()
    assert drive.outcomes() == ["committed", "committed"]


@pytest.mark.parametrize("phase", ["prefetch", "hold", "in_flight", "pause_prefill", "freeze", "pause_decode"])
def test_an_update_that_is_cancelled_before_a_load_leaves_the_fleet_in_its_epoch(phase: Phase) -> None:
    drive = Driver()
    drive.update()
    drive.run_to(phase)
    drive.cancel()
    drive.cancel()
    drive.run()
    assert (drive.outcomes(), drive.holds(), drive.router.gate) == (["cancelled"], {("v0", 1, False)}, "open")
    assert drive.loaded() == []


def test_cancelling_after_a_write_rolls_back_and_after_the_commit_does_nothing() -> None:
    drive = Driver()
    drive.update()
    drive.run(until=lambda: drive.engines["decode-2"].weights == "v1")
    drive.cancel()
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 3, False)})
    assert drive.journal[-1].ended == Ended(update=1, outcome="rolled_back", why="by request")
    drive.update()
    drive.run_to("confirm")
    drive.cancel()
    drive.run()
    assert drive.outcomes() == ["rolled_back", "committed"]


def test_only_the_update_that_is_meant_is_cancelled() -> None:
    drive = Driver()
    drive.update()
    drive.run_to("hold")
    drive.step(events.Cancelled(update=7))
    drive.run()
    assert drive.outcomes() == ["committed"]


def test_an_answer_to_an_older_command_counts_for_nothing() -> None:
    drive = Driver()
    drive.update()
    drive.run_to("load")
    old = drive.wire[0].order
    drive.start()
    drive.step(events.Answered(order=old))
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["committed"], {("v1", 2, False)})


def test_a_load_that_comes_late_is_seen_or_refused_before_anyone_is_relabelled() -> None:
    """Invariant 4: the answer to what an engine holds is only good once nothing older can reach it."""
    drive = Driver()
    drive.update()
    drive.run_to("load")
    drive.run(until=lambda: any(isinstance(each.ask, acts.Load) for each in drive.wire))
    late = next(each for each in drive.wire if isinstance(each.ask, acts.Load))
    drive.wire.remove(late)
    drive.cancel()
    drive.run(until=lambda: acts.ReadEngine not in {type(each.ask) for each in drive.wire})
    drive.answer(late)
    drive.run()
    assert (drive.outcomes(), drive.holds()) == (["rolled_back"], {("v0", 3, False)})
    assert (late.receiver, "v0") in drive.loaded()


def test_a_pause_that_comes_late_stops_nobody_who_went_on() -> None:
    drive = Driver()
    drive.update()
    drive.run(until=lambda: any(isinstance(each.ask, acts.Pause) for each in drive.wire))
    late = next(each for each in drive.wire if isinstance(each.ask, acts.Pause))
    drive.wire.remove(late)
    drive.cancel()
    drive.run()
    assert drive.answer(late) == events.Answered(order=late.order, error="overtaken")
    assert (drive.outcomes(), drive.holds()) == (["cancelled"], {("v0", 1, False)})


@pytest.mark.parametrize("strategy", ["barrier", "rolling"])
@pytest.mark.parametrize("is_torn", [False, True])
def test_a_coordinator_may_die_after_any_act(strategy: Strategy, is_torn: bool) -> None:
    """Invariant 8: whatever it was about to do or had just done, the next one ends it on one epoch."""
    dies_after, count = 0, 1
    while dies_after < count:
        dies_after += 1
        drive = Driver()
        drive.load_ends = {"decode-3": "torn"} if is_torn else {}
        drive.dies_after = dies_after
        drive.update(strategy=strategy)
        drive.run(until=lambda: drive.restarted() != [] or drive.coordinator.position.course is None)  # noqa: B023
        drive.load_ends.clear()
        for name in dict.fromkeys(drive.restarted()):
            drive.boot(name)
        drive.run()
        drive.run(until=lambda: not drive.wire)  # noqa: B023
        drive.run()
        committed = drive.journal[-1].committed
        assert drive.holds() == {(committed.version, committed.epoch, False)}, dies_after
        assert (drive.router.gate, committed.version) == ("open", "v0" if is_torn else "v1"), dies_after
        count = len(drive.done)


PHASES = ["prefetch", "hold", "in_flight", "pause_prefill", "freeze", "pause_decode", "load", "confirm", "publish"]


@pytest.mark.parametrize("phase", [*PHASES, "resume", "open", "purge"])
def test_a_coordinator_that_dies_reads_back_first_and_ends_the_update(phase: str) -> None:
    """Invariant 8."""
    drive = Driver()
    drive.update()
    drive.run_to(phase)  # type: ignore[arg-type]
    count = len(drive.done)
    drive.start()
    kinds = {type(act.ask) for act in drive.done[count:] if isinstance(act, acts.Command)}
    assert kinds == {acts.ReadEngine, acts.ReadRouter}
    drive.run()
    assert (drive.journal[-1].committed.version, drive.holds()) == ("v1", {("v1", 2, False)})
