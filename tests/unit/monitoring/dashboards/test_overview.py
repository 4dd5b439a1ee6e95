"""The overview asks only for what exists (field case A36) and says what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monitoring.catalogue import BY_SERIES, JOB_LABEL, METRICS
from monitoring.dashboards.overview import overview
from monitoring.dashboards.panels import expressions

RECORDED = Path(__file__).parents[3] / "golden" / "monitoring"
JOB = "swe-rollouts"
MODEL = overview(JOB)
EXPRESSIONS = expressions(MODEL)
PANELS = [panel for panel in MODEL["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]

KEYWORDS = {"or", "and", "unless", "bool", "offset"}


def metric_names(expression: str) -> set[str]:
    """The series names in a PromQL expression, found without the catalogue."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", expression)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    names = re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", bare)
    return set(names) - KEYWORDS


def recorded_series() -> set[str]:
    lines = [line for file in RECORDED.glob("*.prom") for line in file.read_text().splitlines()]
    return {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}


def test_metric_names_are_found() -> None:
    expression = 'sum by (le, role) (rate(a:b_bucket{x="y(z)"}[$__w])) / on (c) max(d) or on () 0 * avg by (e) (f == 1)'
    assert metric_names(expression) == {"a:b_bucket", "d", "f"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_name_is_in_the_catalogue(expression: str) -> None:
    names = metric_names(expression)
    assert names
    assert names <= BY_SERIES.keys()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_foreign_name_is_in_a_recorded_exposition(expression: str) -> None:
    foreign = {name for name in metric_names(expression) if BY_SERIES[name].source in ("engine", "master")}
    assert foreign <= recorded_series()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_shares_are_never_summed(expression: str) -> None:
    if any(BY_SERIES[name].unit == "ratio" for name in metric_names(expression)):
        assert re.match(r"(max|avg) by ", expression)
        assert "sum" not in expression


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_selector_is_scoped_to_the_job(expression: str) -> None:
    selectors = re.findall(r"\{[^}]*\}", expression)
    assert len(selectors) == sum(expression.count(f"{name}{{") for name in metric_names(expression))
    assert all(f'{JOB_LABEL}="{JOB}"' in selector for selector in selectors)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_no_constant_stands_in_for_a_missing_series(expression: str) -> None:
    assert "vector(" not in expression


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"])
def test_legends_use_labels_that_survive_the_aggregation(target: dict) -> None:
    kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept
    assert target["legendFormat"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_says_what_it_shows(panel: dict) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_catalogued_metric_is_shown() -> None:
    used = {BY_SERIES[name].name for expression in EXPRESSIONS for name in metric_names(expression)}
    assert used == {metric.name for metric in METRICS}


def test_it_is_json_and_does_not_vary() -> None:
    assert json.dumps(overview(JOB)) == json.dumps(MODEL)
