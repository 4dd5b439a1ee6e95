"""Which answers of engines the coordinator believes."""

from __future__ import annotations

import pytest

from orchestrator.spec.weights import Strategy
from orchestrator.weights import acts
from tests.unit.orchestrator.weights.driver import Driver


def test_a40_an_engine_whose_life_cannot_be_trusted_is_restarted_at_once() -> None:
    """After a rank raised, no later answer of that life is believed."""
    drive = Driver()
    drive.load_ends["decode-2"] = "lost"
    drive.update()
    drive.run(until=lambda: drive.outcomes() != [])
    assert (drive.outcomes(), drive.restarted()) == (["committed"], ["decode-2"])
    assert [name for name, _ in drive.loaded()].count("decode-2") == 1


@pytest.mark.parametrize("strategy", ["barrier", "rolling"])
def test_a25_a_pause_that_says_done_is_believed_by_what_the_engine_is(strategy: Strategy) -> None:
    drive = Driver()
    drive.liars["decode-2", acts.Pause] = 2
    drive.update(strategy=strategy)
    drive.run()
    told = [command.receiver for command in drive.sent(acts.Pause)].count("decode-2")
    assert (drive.outcomes(), told, drive.restarted()) == (["committed"], 3, [])
    assert (drive.holds(), drive.router.gate) == ({("v1", 2, False)}, "open")


@pytest.mark.parametrize("ask", [acts.ConfirmEpoch, acts.Resume])
def test_a25_an_engine_that_will_not_serves_nothing_and_the_reason_is_told(ask: type[acts.Ask]) -> None:
    drive = Driver()
    drive.refusals["decode-2", ask] = "404: no such route"
    drive.update()
    drive.run(until=lambda: drive.outcomes() != [])
    assert drive.restarted() == ["decode-2"]
    assert any("decode-2" in act.name and act.why for act in drive.done if isinstance(act, acts.Restart))
    assert ("v0", 1, False) not in drive.holds(), "nobody serves what the gate has left"
