"""Small builders for Grafana dashboards: queries -> panels -> rows on the 24-column grid -> JSON model.

The dashboards of this folder come before (they choose panels and expressions), Grafana after, which reads
the JSON from the folder that `stack.py` provisions. Nothing here knows a metric.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

GrafanaUnit = Literal["short", "reqps", "s", "bytes", "Bps", "percentunit", "suffix: tok/s", "suffix: /s"]

GRID_COLUMNS = 24
PANEL_HEIGHT = 8
SCHEMA_VERSION = 39
"""The dashboard schema of Grafana 10.4; later releases migrate it when they load it."""

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, kw_only=True)
class Query:
    """One expression and the name of its series in the legend."""

    expression: str
    legend: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Lines over time."""

    title: str
    description: str
    unit: GrafanaUnit
    queries: tuple[Query, ...]
    columns: int
    top: float | None = None
    """The axis ends here; None lets it follow the data."""


@dataclass(frozen=True, kw_only=True)
class NameOfSeries:
    """The legend of the current series in large letters, for a state that is told by a label."""

    title: str
    description: str
    query: Query
    columns: int


Panel = Graph | NameOfSeries


@dataclass(frozen=True, kw_only=True)
class Row:
    """A titled row of panels; it wraps when its panels are wider than the grid."""

    title: str
    panels: tuple[Panel, ...]


def dashboard(key: str, job: str, title: str, rows: Sequence[Row], refresh_s: int) -> dict[str, object]:
    """The JSON model of one dashboard. The same input gives the same model, uid included."""
    return {
        "uid": _uid(key, job),
        "title": title,
        "tags": ["headrace"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": f"{refresh_s}s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable()]},
        "annotations": {"list": []},
        "panels": _lay_out(rows),
    }


def expressions(model: Mapping[str, object]) -> list[str]:
    """Every PromQL expression of a dashboard, in the order of its panels."""
    panels = model["panels"]
    assert isinstance(panels, list)
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def _uid(key: str, job: str) -> str:
    # With the job in it, the dashboards of two jobs can live in one Grafana.
    return "headrace-" + hashlib.sha256(f"{key}\n{job}".encode()).hexdigest()[:16]


def _datasource_variable() -> dict[str, object]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _lay_out(rows: Sequence[Row]) -> list[dict[str, object]]:
    placed: list[dict[str, object]] = []
    y = 0
    for row in rows:
        placed.append(_row_header(row.title, panel_id=len(placed) + 1, y=y))
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.columns > GRID_COLUMNS:
                x, y = 0, y + PANEL_HEIGHT
            grid = {"h": PANEL_HEIGHT, "w": panel.columns, "x": x, "y": y}
            placed.append({"id": len(placed) + 1, "gridPos": grid, **_panel(panel)})
            x += panel.columns
        y += PANEL_HEIGHT
    return placed


def _row_header(title: str, *, panel_id: int, y: int) -> dict[str, object]:
    grid = {"h": 1, "w": GRID_COLUMNS, "x": 0, "y": y}
    return {"id": panel_id, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []}


def _panel(panel: Panel) -> dict[str, object]:
    match panel:
        case Graph():
            return _graph(panel)
        case NameOfSeries():
            return _name_of_series(panel)


def _graph(panel: Graph) -> dict[str, object]:
    defaults: dict[str, object] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "palette-classic"},
        "custom": {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never"},
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(index, query, instant=False) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _name_of_series(panel: NameOfSeries) -> dict[str, object]:
    return {
        "type": "stat",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(0, panel.query, instant=True)],
        "fieldConfig": {"defaults": {"unit": "short", "color": {"mode": "thresholds"}}, "overrides": []},
        "options": {
            "textMode": "name",
            "colorMode": "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _target(index: int, query: Query, *, instant: bool) -> dict[str, object]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "instant": instant,
        "range": not instant,
    }
