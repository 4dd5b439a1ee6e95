from __future__ import annotations

import pytest

from router.core.retry import RetryBudget, backoff_s


def test_a_fleet_that_fails_everything_is_soon_asked_only_once() -> None:
    budget = RetryBudget.full(per_request=0.2, most=3)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_requests_served_earn_retries_up_to_the_limit() -> None:
    budget = RetryBudget.full(per_request=0.5, most=2)
    assert budget.take()
    assert budget.take()
    budget.request_served()
    assert not budget.take()
    budget.request_served()
    assert budget.take()
    for _ in range(100):
        budget.request_served()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_pauses_double_and_differ_between_requests() -> None:
    assert [backoff_s(0.1, retries, 0) for retries in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    pauses = {backoff_s(0.1, 0, number) for number in range(100)}
    assert len(pauses) > 10
    assert all(0.05 < pause <= 0.1 for pause in pauses)


def test_no_pause_where_none_is_asked_for() -> None:
    assert backoff_s(0.0, 5, 3) == 0.0
