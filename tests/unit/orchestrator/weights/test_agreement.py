"""What counts as a reply that old KV went into."""

from __future__ import annotations

import math

import pytest

from orchestrator.weights.agreement import FLOOR, TIMES_NOISE, UNSTEADY, WORST, Judgement, judge

COLD = (-1.0, -2.0, -3.0)


def test_the_same_within_rounding() -> None:
    given = (-1.0, -2.0 + FLOOR / 2, -3.0)
    assert judge(given, [COLD, COLD]) == Judgement(
        outcome="agrees", compared=3, off_by=pytest.approx(FLOOR / 2), at=1, noise=0.0, allowed=FLOOR
    )


def test_one_token_that_is_off_is_enough() -> None:
    judged = judge((-1.0, -2.0, -3.4), [COLD, COLD])
    assert (judged.outcome, judged.at, judged.off_by) == ("disagrees", 2, pytest.approx(0.4))


@pytest.mark.parametrize("given", [(math.nan, -2.0, -3.0), (-1.0, -2.0, math.nan), (-1.0, -math.inf, -3.0)])
def test_what_is_no_number_agrees_with_nothing(given: tuple[float, ...]) -> None:
    judged = judge(given, [COLD, COLD])
    assert (judged.outcome, judged.off_by) == ("disagrees", WORST)
    assert judge(COLD, [given, given]).outcome == "unsteady"


def test_what_is_allowed_follows_from_the_noise() -> None:
    noisy = (-1.0, -2.02, -3.0)
    within, beyond = 0.9 * TIMES_NOISE * 0.02, 1.1 * TIMES_NOISE * 0.02
    assert judge((-1.0, -2.0, -3.0 - within), [COLD, noisy]).outcome == "agrees"
    assert judge((-1.0, -2.0, -3.0 - beyond), [COLD, noisy]).outcome == "disagrees"


def test_it_may_be_like_any_of_the_replays() -> None:
    """What was served from the cache is like the replay that was, where that differs from one without."""
    cached = (-1.0, -2.01, -3.0)
    assert judge(cached, [COLD, cached]).off_by == 0.0


def test_replays_that_differ_by_much_prove_nothing() -> None:
    elsewhere = (-1.0, -2.0, -3.0 - 1.1 * UNSTEADY)
    assert judge((-5.0, -5.0, -5.0), [COLD, elsewhere]).outcome == "unsteady"
