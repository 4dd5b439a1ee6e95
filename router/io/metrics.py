"""The router's metrics: their declarations as data, and the registry that holds them.

`server.py` counts requests, `exchange.py` carries out the flow's count commands; gauges are read from the fleet
when someone asks. Label values come from fixed sets and from the settings only: never an id, a path or a model name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.core.commands import Count, CountClientGone, CountHandoff, CountLeg, CountRetry, HandoffOutcome
from router.core.fleet import Fleet
from router.core.gate import GATE_STATES, Gate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "headrace_router_"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 7200)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric as the dashboards know it."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


_BY_REPLICA = ("replica", "role")

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="requests_total",
        type="counter",
        labels=("route", "code"),
        help="Requests answered; code 499: the client left first.",
    ),
    MetricSpec(
        name="request_seconds",
        type="histogram",
        labels=("route",),
        help="Seconds from a request's arrival to the end of its reply.",
    ),
    MetricSpec(
        name="first_byte_seconds",
        type="histogram",
        labels=("route",),
        help="Seconds from a request's arrival to the first byte of its successful reply.",
    ),
    MetricSpec(name="legs_total", type="counter", labels=("role", "outcome"), help="Requests sent to engines, by end."),
    MetricSpec(name="legs_in_flight", type="gauge", labels=_BY_REPLICA, help="Requests an engine is working on."),
    MetricSpec(name="active_sessions", type="gauge", labels=_BY_REPLICA, help="Sessions pinned to a replica."),
    MetricSpec(
        name="tokens_in_flight",
        type="gauge",
        labels=_BY_REPLICA,
        help="Prompt tokens of the legs in flight, estimated as a quarter of the body's bytes.",
    ),
    MetricSpec(name="replica_up", type="gauge", labels=_BY_REPLICA, help="1 if the replica may be used."),
    MetricSpec(name="gate", type="gauge", labels=("state",), help="1 for the gate's present state."),
    MetricSpec(
        name="handoffs_total",
        type="counter",
        labels=("outcome",),
        help="Handoffs of prefill engines: sent on, missing in a good reply, too old to be sent, received for nothing.",
    ),
    MetricSpec(name="retries_total", type="counter", labels=(), help="Fresh attempts after the first."),
    MetricSpec(name="client_gone_total", type="counter", labels=(), help="Requests whose client left before the end."),
)


class Metrics:
    """The metrics of one router process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in METRICS:
            name = PREFIX + spec.name
            if spec.type == "counter":
                self._counters[spec.name] = Counter(name, spec.help, spec.labels, registry=self._registry)
            elif spec.type == "gauge":
                self._gauges[spec.name] = Gauge(name, spec.help, spec.labels, registry=self._registry)
            else:
                self._histograms[spec.name] = Histogram(
                    name, spec.help, spec.labels, registry=self._registry, buckets=_BUCKETS
                )
        for outcome in get_args(HandoffOutcome):
            # Visible from the start, so that the first one is a rise and not a new series.
            self._counters["handoffs_total"].labels(outcome)

    def request_done(self, route: str, code: int, seconds: float) -> None:
        self._counters["requests_total"].labels(route, str(code)).inc()
        self._histograms["request_seconds"].labels(route).observe(seconds)

    def first_byte(self, route: str, seconds: float) -> None:
        self._histograms["first_byte_seconds"].labels(route).observe(seconds)

    def count(self, command: Count) -> None:
        match command:
            case CountLeg(role=role, outcome=outcome):
                self._counters["legs_total"].labels(role, outcome).inc()
            case CountHandoff(outcome=handoff):
                self._counters["handoffs_total"].labels(handoff).inc()
            case CountRetry():
                self._counters["retries_total"].inc()
            case CountClientGone():
                self._counters["client_gone_total"].inc()

    def render(self, fleet: Fleet, gate: Gate) -> bytes:
        """The exposition text, gauges as they are now."""
        gauges = self._gauges
        for view in fleet.views():
            labels = (view.name, view.role)
            gauges["legs_in_flight"].labels(*labels).set(view.legs_in_flight)
            gauges["active_sessions"].labels(*labels).set(view.active_sessions)
            gauges["tokens_in_flight"].labels(*labels).set(view.tokens_in_flight)
            gauges["replica_up"].labels(*labels).set(1 if view.usable else 0)
        for state in GATE_STATES:
            gauges["gate"].labels(state).set(1 if state == gate.state else 0)
        return generate_latest(self._registry)
