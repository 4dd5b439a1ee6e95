"""Every metric we read or expose: name, type, unit, labels, help and where it comes from.

Nothing comes before this module. `router/io/metrics.py` registers the router's part; `rules.py` publishes
the plan's part; `promql.py` and the dashboards refuse a name that is not here. The names of engine and
master metrics are those of the pinned versions and are checked against recorded expositions.

Every label is bounded by the size of the job: a replica, a role, a route template, an outcome. No session,
request, prompt or free-form model name is ever a label (field case A37).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Source = Literal["router", "engine", "master", "plan"]
MetricType = Literal["counter", "gauge", "histogram"]
Unit = Literal["seconds", "bytes", "tokens", "requests", "sessions", "replicas", "keys", "events", "ratio", "flag"]

ROUTER_PREFIX = "headrace_router_"
PLAN_PREFIX = "headrace_plan_"
JOB_LABEL = "headrace_job"
"""On every series: added to targets by `scrape.py`, to plan series by `rules.py`."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric family as its source exposes it."""

    name: str
    """As written in an exposition: a counter's name includes its suffix, a histogram's does not."""
    type: MetricType
    unit: Unit
    labels: tuple[str, ...]
    """Labels of the source itself that we use; those added at the scrape are not repeated here."""
    help: str
    source: Source

    def series(self) -> tuple[str, ...]:
        """The names under which samples of this metric are stored."""
        if self.type == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def _router(name: str, type_: MetricType, unit: Unit, labels: tuple[str, ...], help_: str) -> Metric:
    return Metric(name=ROUTER_PREFIX + name, type=type_, unit=unit, labels=labels, help=help_, source="router")


def _engine(name: str, type_: MetricType, unit: Unit, help_: str) -> Metric:
    labels = ("model_name", "engine")
    return Metric(name="vllm:" + name, type=type_, unit=unit, labels=labels, help=help_, source="engine")


def _master(name: str, type_: MetricType, unit: Unit, help_: str) -> Metric:
    return Metric(name="master_" + name, type=type_, unit=unit, labels=(), help=help_, source="master")


def _plan(name: str, unit: Unit, labels: tuple[str, ...], help_: str) -> Metric:
    return Metric(name=PLAN_PREFIX + name, type="gauge", unit=unit, labels=labels, help=help_, source="plan")


_REPLICA = ("replica", "role")

METRICS: tuple[Metric, ...] = (
    _router(
        "requests_total",
        "counter",
        "requests",
        ("route", "code"),
        'Requests by route template ("other" for unknown paths) and status code; 499: the client left first.',
    ),
    _router("request_seconds", "histogram", "seconds", ("route",), "From a request's arrival to the end of its reply."),
    _router(
        "first_byte_seconds",
        "histogram",
        "seconds",
        ("route",),
        "From a request's arrival to the first byte of its successful reply.",
    ),
    _router("legs_total", "counter", "requests", ("role", "outcome"), "Finished engine legs by role and outcome."),
    _router("legs_in_flight", "gauge", "requests", _REPLICA, "Engine legs sent and not finished."),
    _router("active_sessions", "gauge", "sessions", _REPLICA, "Sessions pinned to a replica."),
    _router(
        "tokens_in_flight",
        "gauge",
        "tokens",
        _REPLICA,
        "Prompt tokens of the legs in flight, estimated as a quarter of the body's bytes.",
    ),
    _router("replica_up", "gauge", "flag", _REPLICA, "1 while this router may send legs to the replica."),
    _router("gate", "gauge", "flag", ("state",), "1 for the gate's current state (open, holding, frozen), else 0."),
    _router(
        "handoffs_total",
        "counter",
        "events",
        ("outcome",),
        "Handoffs of prefill engines: sent on, missing in a good reply, too old to be sent, unused otherwise.",
    ),
    _router("retries_total", "counter", "events", (), "Fresh attempts after the first."),
    _router("readmitted_total", "counter", "requests", (), "Running requests put back in line for an update."),
    _router(
        "choices_total",
        "counter",
        "events",
        ("role", "reason"),
        "Legs by why they went where they went: new, pinned, moved (wait, full, failed, lost), unpinned.",
    ),
    _router(
        "requests_waiting", "gauge", "requests", (), "Requests in line: closed gate, no room, no such version yet."
    ),
    _router("requests_admitted", "gauge", "requests", (), "Requests that have been given a leg and are not over."),
    _router("replica_epoch", "gauge", "events", _REPLICA, "Weight epoch that a replica has confirmed; -1: none."),
    _router(
        "audits_total",
        "counter",
        "requests",
        ("outcome",),
        "Audited requests: agrees, disagrees (stale or corrupt KV), unsteady (too much noise to judge), skipped.",
    ),
    _router("client_gone_total", "counter", "requests", (), "Requests whose client left before the end."),
    _engine("num_requests_running", "gauge", "requests", "Requests in model execution batches."),
    _engine("num_requests_waiting", "gauge", "requests", "Requests waiting to be processed."),
    _engine("generation_tokens_total", "counter", "tokens", "Generation tokens processed."),
    _engine("prompt_tokens_total", "counter", "tokens", "Prompt tokens processed, cached ones included."),
    _engine("kv_cache_usage_perc", "gauge", "ratio", "Share of the engine's KV cache in use; 1 is full."),
    _engine("prefix_cache_queries_total", "counter", "tokens", "Tokens looked up in the engine's own prefix cache."),
    _engine("prefix_cache_hits_total", "counter", "tokens", "Tokens found in the engine's own prefix cache."),
    _engine("external_prefix_cache_hits_total", "counter", "tokens", "Tokens whose KV came through a KV connector."),
    _engine("nixl_bytes_transferred", "histogram", "bytes", "Bytes per NIXL transfer, counted by the reading engine."),
    _master("allocated_bytes", "gauge", "bytes", "Pool memory in use over all mounted segments."),
    _master("total_capacity_bytes", "gauge", "bytes", "Pool memory of all mounted segments."),
    _master("key_count", "gauge", "keys", "Keys that the master manages."),
    _master("evicted_key_count", "counter", "keys", "Keys evicted so far."),
    _master("put_start_alloc_failures_total", "counter", "events", "Writes refused because no memory could be had."),
    _plan("replicas", "replicas", ("role",), "Replicas that the job's plan asks for."),
    _plan("pool_bytes", "bytes", (), "Pool memory that the job's plan asks for, over all nodes."),
)

BY_NAME: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in METRICS})
BY_SERIES: Mapping[str, Metric] = MappingProxyType({name: metric for metric in METRICS for name in metric.series()})
