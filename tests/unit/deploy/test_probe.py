from __future__ import annotations

import pytest

from deploy.probe import check, metric_sum
from deploy.unit import HttpProbe, MetricProbe

TEXT = """\
# TYPE vllm:requests counter
vllm:requests{engine="0"} 3
vllm:requests{engine="1"} 4
# TYPE done_total counter
done_total 5
# TYPE latency histogram
latency_bucket{le="1"} 1
latency_bucket{le="+Inf"} 2
latency_count 2
latency_sum 1.5
untyped 7
"""


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("vllm:requests", 7.0),
        ("done_total", 5.0),
        ("latency_count", 2.0),
        ("latency_bucket", 3.0),
        ("untyped", 7.0),
        ("latency", None),
        ("absent", None),
    ],
)
def test_metric_sum(metric, expected):
    assert metric_sum(TEXT, metric) == expected


@pytest.mark.parametrize(
    "url", ["http://::1:8000/health", "http://[::1/health", "http://a\x00b/health", "http:///x", "x"]
)
def test_an_address_that_is_none_is_an_answer(url):
    for probe in (HttpProbe(url=url), MetricProbe(url=url, metric="m", at_least=1)):
        result = check(probe, ())
        assert not result.ready
        assert result.detail.startswith("GET ")
