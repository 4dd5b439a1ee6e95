"""Who moves next: at least one pair of some epoch always serves."""

from __future__ import annotations

from typing import get_args

import pytest

from connectors.types import Role
from orchestrator.spec.weights import Strategy
from orchestrator.weights.groups import has_pair, next_group, serves, update_refusal

TWO_PAIRS: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


def group(fleet: dict[str, Role], serving: dict[str, int], *, pairs: int = 1) -> tuple[str, ...]:
    waiting = [name for name in fleet if serving.get(name) != 2]
    return next_group(fleet=fleet, waiting=waiting, now_serving=serving, epoch=2, pairs=pairs)


def test_a_pair_is_within_one_epoch() -> None:
    assert has_pair(["p0", "d1"], TWO_PAIRS)
    assert not has_pair(["p0", "p1"], TWO_PAIRS)
    assert has_pair(["c"], {"c": "colocated"})
    assert serves({"p0": 1, "d0": 2, "d1": 1}, TWO_PAIRS)
    assert not serves({"p0": 1, "d0": 2}, TWO_PAIRS)


def test_the_first_group_is_a_pair_that_leaves_one() -> None:
    assert group(TWO_PAIRS, dict.fromkeys(TWO_PAIRS, 1)) == ("p0", "d0")


def test_nobody_goes_who_is_needed() -> None:
    assert group(TWO_PAIRS, {"p0": 1, "d0": 1, "d1": 2}) == ("p1",)
    assert group({"p0": "prefill", "d0": "decode", "d1": "decode"}, {"p0": 1, "d0": 1, "d1": 2}) == ()


def test_who_does_not_serve_goes_first() -> None:
    assert group(TWO_PAIRS, {"p0": 1, "d0": 1, "d1": 1}) == ("p1",)


def test_an_epoch_with_half_a_pair_gets_the_other_half() -> None:
    assert group(TWO_PAIRS | {"d2": "decode"}, {"p0": 1, "p1": 1, "d0": 1, "d1": 1, "d2": 2}) == ("p0",)


def test_the_rest_goes_in_chunks_once_the_new_epoch_serves() -> None:
    fleet = TWO_PAIRS | {"p2": "prefill", "d2": "decode", "d3": "decode"}
    serving = dict.fromkeys(fleet, 1) | {"p0": 2, "d0": 2}
    assert group(fleet, serving) == ("p1", "d1")
    assert group(fleet, serving, pairs=2) == ("p1", "d1", "p2", "d2")


def test_where_nothing_serves_nothing_is_protected() -> None:
    assert group(TWO_PAIRS, {"p0": 1, "p1": 1}) == ("d0", "d1")
    assert group({"p0": "prefill", "d0": "decode"}, {"p0": 1, "d0": 3}) == ("p0", "d0")


@pytest.mark.parametrize(
    ("roles", "is_refused"),
    [
        (["prefill", "prefill", "decode", "decode"], False),
        (["colocated", "colocated"], False),
        (["colocated", "prefill", "decode"], False),
        (["colocated"], True),
        (["prefill", "prefill", "decode"], True),
    ],
)
def test_a_fleet_without_a_second_pair_is_too_small(roles: list[Role], is_refused: bool) -> None:
    fleet = {str(index): role for index, role in enumerate(roles)}
    assert bool(update_refusal(fleet, (), "rolling", wipes_pool=False)) == is_refused
    assert update_refusal(fleet, (), "barrier", wipes_pool=False) == ""


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_what_is_left_without_a_pair_is_not_updated(strategy: Strategy) -> None:
    refusal = update_refusal(TWO_PAIRS, ("d0", "d1"), strategy, wipes_pool=False)
    assert refusal == "no pair of engines is left to load new weights without those drained or restarted now: d0, d1"
