"""PromQL text for one job, from names that the catalogue knows.

`catalogue.py` comes before; `dashboards/` comes after. An unknown name, a `rate` of a gauge or a bare
counter is refused when the expression is built, not found out as an empty panel.
"""

from __future__ import annotations

from dataclasses import dataclass

from monitoring.catalogue import BY_NAME, BY_SERIES, JOB_LABEL, Metric

RATE_WINDOW = "$__rate_interval"
"""Grafana's own variable: at least four scrapes, wider when the graph is zoomed out."""


def quote(text: str) -> str:
    """`text` as a PromQL string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def zero_if_quiet(expression: str, scale: str) -> str:
    """`expression`, or 0 where it has no series although `scale` has one.

    For counters whose labelled series appear with their first event. A constant 0 would also be drawn
    for a source that is down or a name that is gone.
    """
    return f"{expression} or on () 0 * {scale}"


@dataclass(frozen=True)
class JobSeries:
    """Expressions over the series of one job. Matchers are PromQL text, e.g. `role!="decode"`."""

    job: str

    def gauge(self, name: str, *matchers: str) -> str:
        """The current value of a gauge."""
        _expect(BY_NAME[name], "gauge")
        return self._select(name, matchers)

    def rate(self, name: str, *matchers: str) -> str:
        """Per-second rate of a counter."""
        _expect(BY_NAME[name], "counter")
        return self._rate(name, matchers)

    def sum_rate(self, name: str, *matchers: str) -> str:
        """Per-second rate of what a histogram has observed in total."""
        _expect(BY_NAME[name], "histogram")
        return self._rate(f"{name}_sum", matchers)

    def quantile(self, q: float, name: str, *matchers: str) -> str:
        """A quantile of a histogram over the rate window, all its series together."""
        _expect(BY_NAME[name], "histogram")
        return f"histogram_quantile({q:g}, sum by (le) ({self._rate(f'{name}_bucket', matchers)}))"

    def _rate(self, series: str, matchers: tuple[str, ...]) -> str:
        return f"rate({self._select(series, matchers)}[{RATE_WINDOW}])"

    def _select(self, series: str, matchers: tuple[str, ...]) -> str:
        assert series in BY_SERIES, series
        inner = ",".join((f"{JOB_LABEL}={quote(self.job)}", *matchers))
        return f"{series}{{{inner}}}"


def _expect(metric: Metric, type_: str) -> None:
    assert metric.type == type_, f"{metric.name} is a {metric.type}, not a {type_}"
