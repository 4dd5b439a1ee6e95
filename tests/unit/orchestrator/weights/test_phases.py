"""Every way ends, in the order that the design gives it."""

from __future__ import annotations

import pytest

from orchestrator.spec.weights import Strategy
from orchestrator.weights.course import begin, begin_join, call_off, enter, turn_back
from orchestrator.weights.phases import AFTER_GROUPS, next_phase
from orchestrator.weights.words import Phase, Position, Update, first_position
from tests.unit.orchestrator.weights.driver import LIMITS

BARRIER = "load commit confirm publish resume open purge"
MOVES = "choose drain pause_prefill pause_decode load confirm publish resume admit"
FIRST = first_position(1, "v0", {"version": "v0"})


def begun(strategy: Strategy) -> Position:
    update = Update(
        number=1,
        version="v1",
        source={"version": "v1"},
        strategy=strategy,
        in_flight="readmit",
        load_mode="gpu_fetch",
        limits=LIMITS,
    )
    return begin(FIRST, update)


def way(position: Position) -> str:
    """All phases, one group."""
    told: list[Phase] = []
    phase: Phase | None = position.course.phase if position.course else None
    while phase is not None and position.course is not None:
        told.append(phase)
        position = enter(position, phase)
        assert position.course is not None
        phase = next_phase(position.course)
        if phase == "choose" and "choose" in told:
            phase = AFTER_GROUPS[position.course.going]
    return " ".join(told)


@pytest.mark.parametrize(
    ("position", "phases"),
    [
        (begun("barrier"), f"prefetch hold in_flight pause_prefill freeze pause_decode {BARRIER}"),
        (turn_back(begun("barrier"), ""), BARRIER),
        (call_off(begun("barrier"), "", is_cancelled=False), "resume open purge"),
        (begun("rolling"), f"prefetch {MOVES} commit open purge"),
        (turn_back(begun("rolling"), ""), f"{MOVES} commit open purge"),
        (call_off(begun("rolling"), "", is_cancelled=False), "resume admit open purge"),
        (begin_join(FIRST, LIMITS, "gpu_fetch"), f"{MOVES} open"),
    ],
)
def test_the_phases_of_each_way(position: Position, phases: str) -> None:
    assert way(position) == phases


def test_the_version_moves_at_commit_and_nowhere_else() -> None:
    """Invariant 4."""
    position = begun("barrier")
    assert enter(position, "load").committed == FIRST.committed
    committed = enter(position, "commit").committed
    assert (committed.epoch, committed.version) == (2, "v1")


def test_an_epoch_is_never_used_again() -> None:
    position = turn_back(begun("barrier"), "")
    assert position.epochs == {1: "v0", 2: "v1", 3: "v0"}
    committed = enter(position, "commit").committed
    assert (committed.epoch, committed.version) == (3, "v0")
