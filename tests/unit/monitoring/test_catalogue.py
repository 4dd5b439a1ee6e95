"""The catalogue against recorded expositions, and its labels against field case A37."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monitoring.catalogue import BY_NAME, BY_SERIES, METRICS, Metric

RECORDED = Path(__file__).parents[2] / "golden" / "monitoring"
EXPOSITIONS = {"engine": "vllm_engine.prom", "master": "mooncake_master.prom"}

UNBOUNDED = re.compile(r"session|request|prompt|conversation|user|salt|trace|path|url|(^|_)id$|token")


def of_sources(*sources: str) -> list[Metric]:
    return [metric for metric in METRICS if metric.source in sources]


def exposition(metric: Metric) -> str:
    return (RECORDED / EXPOSITIONS[metric.source]).read_text()


@pytest.mark.parametrize("metric", of_sources("engine", "master"), ids=lambda metric: metric.name)
def test_foreign_metric_is_exposed_with_this_type(metric: Metric) -> None:
    assert f"# TYPE {metric.name} {metric.type}\n" in exposition(metric)


@pytest.mark.parametrize("metric", of_sources("engine", "master"), ids=lambda metric: metric.name)
def test_foreign_metric_has_samples_with_these_labels(metric: Metric) -> None:
    for series in metric.series():
        sample = re.search(rf"^{re.escape(series)}(?:\{{(.*)\}})? ", exposition(metric), re.MULTILINE)
        assert sample, f"{series} has no sample"
        labels = set(re.findall(r'(\w+)="', sample.group(1) or ""))
        assert labels - {"le"} == set(metric.labels)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_no_label_is_unbounded(metric: Metric) -> None:
    assert not [label for label in metric.labels if UNBOUNDED.search(label)]


@pytest.mark.parametrize("metric", of_sources("router", "plan"), ids=lambda metric: metric.name)
def test_our_names_follow_the_conventions(metric: Metric) -> None:
    assert metric.name.startswith(f"headrace_{metric.source}_")
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.endswith("_seconds") == (metric.unit == "seconds")
    assert metric.help.endswith(".")


def test_names_and_series_are_unique() -> None:
    assert len(BY_NAME) == len(METRICS)
    assert len(BY_SERIES) == sum(len(metric.series()) for metric in METRICS)
