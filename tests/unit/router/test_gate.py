from __future__ import annotations

import pytest

from router.core.gate import GATE_STATES, Gate, GateState


def test_a_router_starts_frozen() -> None:
    assert Gate().state == "frozen"


@pytest.mark.parametrize(
    ("state", "start", "go_on", "close"),
    [("open", True, True, True), ("holding", False, True, True), ("frozen", False, False, False)],
)
def test_what_each_state_allows(state: GateState, start: bool, go_on: bool, close: bool) -> None:
    gate = Gate()
    gate.set(state)
    assert (gate.may_start, gate.may_continue, gate.may_close) == (start, go_on, close)


def test_a_hold_that_keeps_what_runs_closes_nothing_until_the_gate_opens() -> None:
    gate = Gate()
    gate.set("holding")
    gate.keeps = True
    assert (gate.may_continue, gate.may_close) == (True, False)
    for state in ("frozen", "holding", "open", "holding"):
        gate.set(state)
    assert gate.may_close


def test_the_states_that_can_be_named_are_all_of_them() -> None:
    assert set(GATE_STATES) == {"open", "holding", "frozen"}


def test_commands_are_taken_in_order_and_repeated_ones_again() -> None:
    gate, taken = Gate(), []
    for order in [(1, 1, 1), (1, 1, 2), (1, 1, 2), (1, 2, 0), (1, 1, 9), (2, 0, 0), (1, 9, 9)]:
        taken.append(gate.accepts(order))
        if taken[-1]:
            gate.take(order)
    assert taken == [True, True, True, True, False, True, False]
    assert gate.order == (2, 0, 0)


def test_an_order_that_is_only_asked_about_is_not_taken() -> None:
    gate = Gate()
    assert gate.accepts((9, 0, 0))
    assert gate.accepts((1, 0, 0))
