from __future__ import annotations

import pytest

from router.core.rates import MoveRates, Rate


def test_nothing_is_estimated_before_the_first_sample() -> None:
    assert Rate().seconds_for(10) is None


def test_the_first_sample_counts_in_full_and_later_ones_fade_in() -> None:
    rate = Rate()
    rate.add(1000, 1.0)
    assert rate.seconds_for(500) == 0.5
    rate.add(2000, 1.0)
    assert rate.tokens_per_s == pytest.approx(1200.0)
    for _ in range(50):
        rate.add(2000, 1.0)
    assert rate.tokens_per_s == pytest.approx(2000.0, rel=0.01)


def test_a_sample_without_duration_or_tokens_breaks_nothing() -> None:
    rate = Rate()
    rate.add(10, 0.0)
    assert rate.tokens_per_s == pytest.approx(100_000.0)
    idle = Rate()
    idle.add(0, 1.0)
    assert idle.seconds_for(1) is None


@pytest.mark.parametrize(
    ("cold", "pool", "seconds"),
    [(None, None, None), (100.0, None, 10.0), (None, 50.0, 20.0), (100.0, 50.0, 20.0), (50.0, 100.0, 20.0)],
)
def test_a_prefix_costs_the_slower_of_reading_and_computing(
    cold: float | None, pool: float | None, seconds: float | None
) -> None:
    assert MoveRates(cold=Rate(cold), pool=Rate(pool)).seconds_for_prefix(1000) == seconds
