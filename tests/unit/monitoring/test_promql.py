"""Expressions are scoped to the job, and wrong ones are refused where they are written."""

from __future__ import annotations

import pytest

from monitoring.promql import JobSeries, quote, zero_if_quiet

SERIES = JobSeries("swe")


def test_every_form_names_the_job() -> None:
    job = 'headrace_job="swe"'
    assert SERIES.gauge("master_key_count") == f"master_key_count{{{job}}}"
    assert (
        SERIES.rate("headrace_router_requests_total", 'code="200"')
        == f'rate(headrace_router_requests_total{{{job},code="200"}}[$__rate_interval])'
    )
    assert (
        SERIES.sum_rate("vllm:nixl_bytes_transferred")
        == f"rate(vllm:nixl_bytes_transferred_sum{{{job}}}[$__rate_interval])"
    )
    buckets = f"headrace_router_request_seconds_bucket{{{job}}}"
    assert (
        SERIES.quantile(0.95, "headrace_router_request_seconds")
        == f"histogram_quantile(0.95, sum by (le) (rate({buckets}[$__rate_interval])))"
    )


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="gpu_cache_usage_perc"):
        SERIES.gauge("vllm:gpu_cache_usage_perc")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (SERIES.rate, "vllm:kv_cache_usage_perc"),
        (SERIES.gauge, "vllm:prompt_tokens_total"),
        (SERIES.sum_rate, "vllm:prompt_tokens_total"),
    ],
)
def test_a_form_that_does_not_fit_the_type_is_refused(form, name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        form(name)


def test_a_job_name_cannot_leave_its_string() -> None:
    assert quote('a"b\\c\nd') == r'"a\"b\\c\nd"'


def test_the_zero_is_taken_only_when_nothing_else_answers() -> None:
    assert zero_if_quiet("sum by (x) (a)", "sum(b)") == "sum by (x) (a) or on () 0 * sum(b)"
