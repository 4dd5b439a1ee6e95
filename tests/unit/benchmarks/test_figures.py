"""Medians, ratios and the last line of a benchmark run."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.figures import GOALS, Figure, goal_of, percentile, result_line


def test_a_ratio_is_that_of_the_medians() -> None:
    figure = Figure(goal=goal_of("cpu_ratio_3k7"), ours=[100.0, 900.0, 110.0], peer=[400.0, 440.0, 10.0])
    assert figure.value == pytest.approx(110 / 400)
    assert figure.is_met


def test_a_rate_has_to_be_high_and_a_cost_low() -> None:
    slow = Figure(goal=goal_of("rps_ratio_3k7"), ours=[1000.0], peer=[1000.0])
    cheap = Figure(goal=goal_of("pick_us"), ours=[3.0, 9.0, 4.0], peer=[])
    assert (slow.value, slow.is_met) == (1.0, False)
    assert (cheap.value, cheap.is_met) == (4.0, True)


def test_a_report_shows_rounds_spread_and_verdict() -> None:
    figure = Figure(goal=goal_of("p99_ratio"), ours=[8.0, 2.0, 4.0], peer=[5.0, 10.0, 20.0], notes=["a note"])
    assert figure.report().splitlines() == [
        "p99 latency at the peer's saturation rate, 3.7 kB body",
        "  p99_ratio = 0.4, at most 0.7 wanted: met",
        "  ours: median 4 ms, spread 2 to 8, rounds 8 2 4",
        "  peer: median 10 ms, spread 5 to 20, rounds 5 10 20",
        "  a note",
    ]


def test_the_result_has_every_key_and_null_for_what_was_left_out() -> None:
    result = json.loads(result_line([Figure(goal=goal_of("pick_us"), ours=[3.14159], peer=[])]))
    assert list(result) == [goal.key for goal in GOALS]
    assert result["pick_us"] == 3.14
    assert result["p99_ratio"] is None


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50), (99, 99), (99.5, 100), (100, 100), (1, 1)], ids=lambda value: str(value)
)
def test_percentiles_of_a_hundred_values(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_the_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 99) == 7.0
