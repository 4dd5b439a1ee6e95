"""What is made of facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.weights import acts
from orchestrator.weights.knowledge import Knowledge
from orchestrator.weights.words import EngineFacts, first_position

FACTS = EngineFacts(
    instance="a-1", epoch=1, version="v0", unfit="", paused=False, loading=False, lost=False, served=None
)


@pytest.fixture
def known() -> Knowledge:
    position = first_position(1, "v0", {"version": "v0"})
    return Knowledge(fleet={"a": "colocated"}, wipes_pool=False, position=position, engines={"a": FACTS})


@pytest.mark.parametrize(
    ("changed", "held"),
    [
        ({}, "v0"),
        ({"version": "v1", "epoch": None}, "v1"),
        ({"epoch": 7}, "v0"),
        ({"version": "v1", "unfit": "torn"}, None),
        ({"version": "v1", "loading": True}, None),
    ],
)
def test_an_engine_holds_what_it_says_unless_that_cannot_be_believed(
    known: Knowledge, changed: dict[str, object], held: str | None
) -> None:
    assert known.held_version(replace(FACTS, **changed)) == held  # type: ignore[arg-type]


def test_a_load_closes_the_fence_until_the_next_epoch_is_confirmed(known: Knowledge) -> None:
    source = {"version": "v1"}
    known.carried_out("a", acts.Load(instance="a-1", source=source, peer="", mode="gpu_fetch", limit_s=1.0))
    assert known.engines == {"a": replace(FACTS, version="v1", epoch=None)}
    known.carried_out("a", acts.ConfirmEpoch(instance="a-1", epoch=2))
    assert known.engines == {"a": replace(FACTS, version="v1", epoch=2)}


def test_a_paused_engine_is_read_again(known: Knowledge) -> None:
    """An older load may have come in between; after the pause none can."""
    known.carried_out("a", acts.Pause(instance="a-1", drops_handoffs=False))
    assert (known.engines, known.sealed) == ({"a": None}, {"a"})


def test_who_was_asked_to_serve_is_read_again_and_stops_before_it_is_written_to(known: Knowledge) -> None:
    serving = replace(FACTS, served={"version": "v0"})
    for ask in (
        acts.Prefetch(instance="a-1", source={"version": "v1"}),
        acts.Load(instance="a-1", source={"version": "v1"}, peer="", mode="gpu_fetch", limit_s=1.0),
    ):
        known.engines["a"] = serving
        known.carried_out("a", ask)
        assert known.engines["a"] is not None
        assert known.engines["a"].served is None
    known.carried_out("a", acts.Serve(instance="a-1"))
    assert known.engines == {"a": None}


def test_an_answer_makes_unknown_facts_no_better_known(known: Knowledge) -> None:
    known.engines["a"] = None
    known.carried_out("a", acts.Resume(instance="a-1"))
    assert known.engines == {"a": None}
