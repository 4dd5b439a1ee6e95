"""The router's part of the catalogue, registered with prometheus_client, and the registry that holds it.

Names, labels and help come from `monitoring/catalogue.py`. `server.py` counts requests, `exchange.py` carries out the
flow's count commands; gauges are read from the fleet when someone asks. Label values come from fixed sets and from the
settings only: never an id, a path or a model name.
"""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from monitoring.catalogue import METRICS, ROUTER_PREFIX
from router.core.commands import Count, CountClientGone, CountHandoff, CountLeg, CountRetry, HandoffOutcome
from router.core.fleet import Fleet
from router.core.gate import GATE_STATES, Gate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 7200)


class Metrics:
    """The metrics of one router process, in a registry of their own."""

    def __init__(self) -> None:
        # The times of creation would be one more series beside each counter, and in no catalogue.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            if metric.source != "router":
                continue
            name, key = metric.name, metric.name.removeprefix(ROUTER_PREFIX)
            if metric.type == "counter":
                self._counters[key] = Counter(name, metric.help, metric.labels, registry=registry)
            elif metric.type == "gauge":
                self._gauges[key] = Gauge(name, metric.help, metric.labels, registry=registry)
            else:
                self._histograms[key] = Histogram(name, metric.help, metric.labels, registry=registry, buckets=_BUCKETS)
        for outcome in get_args(HandoffOutcome):
            # Visible from the start, so that the first one is a rise and not a new series.
            self._counters["handoffs_total"].labels(outcome=outcome)

    def request_done(self, route: str, code: int, seconds: float) -> None:
        self._counters["requests_total"].labels(route=route, code=str(code)).inc()
        self._histograms["request_seconds"].labels(route=route).observe(seconds)

    def first_byte(self, route: str, seconds: float) -> None:
        self._histograms["first_byte_seconds"].labels(route=route).observe(seconds)

    def count(self, command: Count) -> None:
        match command:
            case CountLeg(role=role, outcome=outcome):
                self._counters["legs_total"].labels(role=role, outcome=outcome).inc()
            case CountHandoff(outcome=handoff):
                self._counters["handoffs_total"].labels(outcome=handoff).inc()
            case CountRetry():
                self._counters["retries_total"].inc()
            case CountClientGone():
                self._counters["client_gone_total"].inc()

    def render(self, fleet: Fleet, gate: Gate) -> bytes:
        """The exposition text, gauges as they are now."""
        gauges = self._gauges
        for view in fleet.views():
            labels = {"replica": view.name, "role": view.role}
            gauges["legs_in_flight"].labels(**labels).set(view.legs_in_flight)
            gauges["active_sessions"].labels(**labels).set(view.active_sessions)
            gauges["tokens_in_flight"].labels(**labels).set(view.tokens_in_flight)
            gauges["replica_up"].labels(**labels).set(1 if view.usable else 0)
        for state in GATE_STATES:
            gauges["gate"].labels(state=state).set(1 if state == gate.state else 0)
        return generate_latest(self._registry)
