from __future__ import annotations

import pytest

from router.core.breaker import Breaker, BreakerRules

RULES = BreakerRules(failures=3, open_s=1.0, max_open_s=5.0)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    breaker.leg_failed(now, at_once=True)
    assert breaker.state == "open"
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_let_it() -> None:
    breaker = Breaker(RULES)
    for event in ("failed", "failed", "succeeded", "failed", "failed"):
        if event == "failed":
            breaker.leg_failed(0.0, at_once=False)
        else:
            breaker.leg_succeeded()
    seen = [breaker.state]
    breaker.leg_failed(0.0, at_once=False)
    assert [*seen, breaker.state] == ["closed", "open"]


def test_it_rests_before_a_good_probe_allows_a_trial() -> None:
    breaker, seen = opened(now=10.0), []
    for now in (10.9, 11.0):
        breaker.probe_passed(now)
        seen.append(breaker.state)
    breaker.leg_succeeded()
    assert [*seen, breaker.state] == ["open", "trial", "closed"]


def test_a_success_that_began_before_it_opened_does_not_close_it() -> None:
    breaker = opened()
    breaker.leg_succeeded()
    assert breaker.state == "open"


def test_failures_while_open_do_not_make_the_rest_longer() -> None:
    breaker = opened(now=0.0)
    breaker.leg_failed(0.9, at_once=True)
    breaker.probe_passed(1.0)
    assert breaker.state == "trial"


@pytest.mark.parametrize("at_once", [True, False])
def test_each_failed_trial_rests_twice_as_long_up_to_a_limit(at_once: bool) -> None:
    breaker = opened(now=0.0)
    rests = []
    for _ in range(4):
        rests.append(breaker.rests_until)
        breaker.probe_passed(breaker.rests_until)
        breaker.leg_failed(breaker.rests_until, at_once=at_once)
    assert rests == [1.0, 3.0, 7.0, 12.0]


def test_a_success_makes_the_next_rest_short_again() -> None:
    breaker = opened(now=0.0)
    breaker.probe_passed(1.0)
    breaker.leg_failed(1.0, at_once=False)
    breaker.probe_passed(3.0)
    breaker.leg_succeeded()
    breaker.leg_failed(10.0, at_once=True)
    assert breaker.rests_until == 11.0


def test_a_probe_changes_nothing_while_it_is_closed() -> None:
    breaker = Breaker(RULES)
    breaker.leg_failed(0.0, at_once=False)
    breaker.probe_passed(0.0)
    breaker.leg_failed(0.0, at_once=False)
    breaker.leg_failed(0.0, at_once=False)
    assert breaker.state == "open"
