"""The router's part of the catalogue: counters as plain numbers, written out by prometheus_client when someone asks.

Names, labels and help come from `monitoring/catalogue.py`. `public.py` counts requests, `exchange.py` carries out the
flow's count commands; gauges are read from the dispatcher at each scrape. Label values come from fixed sets and from
the settings only: never an id, a path or a model name. Counting is on every request's path, hence no metric objects: a
dictionary entry each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from monitoring.catalogue import METRICS, ROUTER_PREFIX, Metric
from router.core.commands import (
    Count,
    CountChoice,
    CountClientGone,
    CountHandoff,
    CountLeg,
    CountReadmitted,
    CountRetry,
    HandoffOutcome,
)
from router.core.dispatcher import Dispatcher
from router.core.finished import AuditOutcome
from router.core.gate import GATE_STATES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 7200)
_FAMILIES = tuple(metric for metric in METRICS if metric.source == "router")

Labels = tuple[str, ...]
_Key = tuple[str, Labels]


_KEYS: dict[type[Count], Callable[[Any], _Key]] = {
    CountLeg: lambda each: ("legs_total", (each.role, each.outcome)),
    CountChoice: lambda each: ("choices_total", (each.role, each.reason)),
    CountHandoff: lambda each: ("handoffs_total", (each.outcome,)),
    CountRetry: lambda _: ("retries_total", ()),
    CountClientGone: lambda _: ("client_gone_total", ()),
    CountReadmitted: lambda _: ("readmitted_total", ()),
}


class Histogram(msgspec.Struct):
    """Counts per bucket (the last one without a bound) and the sum of what was observed."""

    counts: list[int]
    sum: float = 0.0


class Counts(msgspec.Struct):
    """All that one process has counted; plain data, so that processes can be added up."""

    counters: dict[str, dict[Labels, int]]
    histograms: dict[str, dict[Labels, Histogram]]


class Metrics:
    """What one router process has counted."""

    def __init__(self) -> None:
        self.counted: defaultdict[Any, int] = defaultdict(int)
        """What flows have counted, by `Count`."""
        self._requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        """By route and status."""
        self._audits: dict[AuditOutcome, int] = dict.fromkeys(get_args(AuditOutcome), 0)
        self._histograms: dict[str, dict[str, Histogram]] = {"request_seconds": {}, "first_byte_seconds": {}}
        """By name and route."""
        # Visible from the start, so that the first one is a rise and not a new series.
        handoffs = [CountHandoff(outcome=outcome) for outcome in get_args(HandoffOutcome)]
        self.counted.update(dict.fromkeys((*handoffs, CountRetry(), CountClientGone(), CountReadmitted()), 0))

    def request_done(self, route: str, code: int, seconds: float) -> None:
        self._requests[route, code] += 1
        self._observe("request_seconds", route, seconds)

    def replied(self, route: str, code: int, seconds: float) -> None:
        """A whole reply: its first byte leaves with its last one."""
        if code < 400:
            self._observe("first_byte_seconds", route, seconds)
        self.request_done(route, code, seconds)

    def first_byte(self, route: str, seconds: float) -> None:
        self._observe("first_byte_seconds", route, seconds)

    def audited(self, outcome: AuditOutcome, requests: int) -> None:
        self._audits[outcome] += requests

    def counts(self) -> Counts:
        """A copy of everything."""
        made = Counts({}, {})
        for (route, code), value in self._requests.items():
            made.counters.setdefault("requests_total", {})[route, str(code)] = value
        for count, value in self.counted.items():
            name, labels = _KEYS[type(count)](count)
            made.counters.setdefault(name, {})[labels] = value
        made.counters["audits_total"] = {(outcome,): value for outcome, value in self._audits.items()}
        for name, by_route in self._histograms.items():
            for route, histogram in by_route.items():
                copied = Histogram([*histogram.counts], histogram.sum)
                made.histograms.setdefault(name, {})[route,] = copied
        return made

    def _observe(self, name: str, route: str, seconds: float) -> None:
        by_route = self._histograms[name]
        histogram = by_route.get(route)
        if histogram is None:
            histogram = by_route[route] = Histogram([0] * (len(_BUCKETS) + 1))
        histogram.counts[bisect_left(_BUCKETS, seconds)] += 1
        histogram.sum += seconds


def add_up(all_counts: Iterable[Counts]) -> Counts:
    """The sum over several processes."""
    total = Counts({}, {})
    for counts in all_counts:
        for name, series in counts.counters.items():
            into = total.counters.setdefault(name, {})
            for labels, value in series.items():
                into[labels] = into.get(labels, 0) + value
        for name, histograms in counts.histograms.items():
            joined = total.histograms.setdefault(name, {})
            for labels, histogram in histograms.items():
                known = joined.setdefault(labels, Histogram([0] * len(histogram.counts)))
                known.counts = [a + b for a, b in zip(known.counts, histogram.counts, strict=True)]
                known.sum += histogram.sum
    return total


def render(counts: Counts, dispatcher: Dispatcher) -> bytes:
    """The exposition text, gauges as they are now."""
    registry = CollectorRegistry()
    registry.register(_Exposition(counts, dispatcher))
    return generate_latest(registry)


class _Exposition(Collector):
    """One scrape."""

    def __init__(self, counts: Counts, dispatcher: Dispatcher) -> None:
        self._counts = counts
        self._gauges = _gauges(dispatcher)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for metric in _FAMILIES:
            key = metric.name.removeprefix(ROUTER_PREFIX)
            if metric.type == "counter":
                yield self._counter(metric, self._counts.counters.get(key, {}))
            elif metric.type == "gauge":
                gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in self._gauges.get(key, {}).items():
                    gauge.add_metric(labels, value)
                yield gauge
            else:
                yield self._histogram(metric, self._counts.histograms.get(key, {}))

    @staticmethod
    def _counter(metric: Metric, series: dict[Labels, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in sorted(series.items()):
            family.add_metric(labels, value)
        return family

    @staticmethod
    def _histogram(metric: Metric, series: dict[Labels, Histogram]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, histogram in sorted(series.items()):
            buckets, total = [], 0
            for bound, count in zip((*map(str, map(float, _BUCKETS)), "+Inf"), histogram.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(labels, buckets, histogram.sum)
        return family


def _gauges(dispatcher: Dispatcher) -> dict[str, dict[Labels, float]]:
    made: dict[str, dict[Labels, float]] = {}
    for view in dispatcher.fleet.views():
        labels = (view.name, view.role)
        made.setdefault("legs_in_flight", {})[labels] = view.legs_in_flight
        made.setdefault("active_sessions", {})[labels] = view.active_sessions
        made.setdefault("tokens_in_flight", {})[labels] = view.tokens_in_flight
        made.setdefault("replica_up", {})[labels] = 1 if view.usable else 0
        made.setdefault("replica_epoch", {})[labels] = -1 if view.epoch is None else view.epoch
    made["gate"] = {(state,): 1 if state == dispatcher.gate.state else 0 for state in GATE_STATES}
    made["requests_waiting"] = {(): dispatcher.waiting}
    made["requests_admitted"] = {(): dispatcher.admitted}
    return made
