"""The overview of one job: is it whole, is it serving, where do its tokens come from, what does the router do.

`promql.py` writes the expressions, `panels.py` the JSON. Wanted stands beside seen wherever the plan has a
number. Every expression has an answer on a job that has served a few requests and is now idle, also on one
without prefill and decode roles.
"""

from __future__ import annotations

from monitoring.dashboards.panels import Graph, NameOfSeries, Query, Row, dashboard
from monitoring.promql import JobSeries, zero_if_quiet

REFRESH_S = 10


def overview(job: str) -> dict[str, object]:
    """The overview dashboard of `job` as Grafana's JSON model."""
    series = JobSeries(job)
    rows = (
        Row(title="Job", panels=(_replicas(series), _gate(series), *_requests(series), *_latency(series))),
        Row(title="Engines", panels=(*_engine_load(series), *_engine_caches(series))),
        Row(title="Pool", panels=(*_pool_content(series), *_pool_traffic(series))),
        Row(title="Router", panels=(*_router_load(series), *_router_line(series), *_router_outcomes(series))),
    )
    return dashboard("headrace/overview", job, f"Headrace: {job}", rows, REFRESH_S)


def _replicas(series: JobSeries) -> Graph:
    up = f"sum by (role) (min by (role, replica) ({series.gauge('headrace_router_replica_up')}))"
    return Graph(
        title="Replicas up and planned",
        description="A replica counts as up when every router may send to it. Planned is what the job's plan asks for.",
        unit="short",
        queries=(
            Query(expression=up, legend="{{role}} up"),
            Query(
                expression=f"sum by (role) ({series.gauge('headrace_plan_replicas')})",
                legend="{{role}} planned",
            ),
        ),
        columns=8,
    )


def _gate(series: JobSeries) -> NameOfSeries:
    return NameOfSeries(
        title="Gate",
        description="open: serving. holding: no new request starts. frozen: nothing is sent to engines. "
        "Two names: the routers differ.",
        query=Query(
            expression=f"count by (state) ({series.gauge('headrace_router_gate')} == 1)",
            legend="{{state}}",
        ),
        columns=4,
    )


def _requests(series: JobSeries) -> tuple[Graph, ...]:
    all_requests = f"sum by (route) ({series.rate('headrace_router_requests_total')})"
    total = f"sum({series.rate('headrace_router_requests_total')})"
    failed = series.rate("headrace_router_requests_total", 'code=~"5.."')
    refused = series.rate("headrace_router_requests_total", 'code=~"4.."')
    return (
        Graph(
            title="Requests",
            description="Client requests that ended, by route.",
            unit="reqps",
            queries=(Query(expression=all_requests, legend="{{route}}"),),
            columns=6,
        ),
        Graph(
            title="Errors",
            description="Client requests answered 5xx (our side) and 4xx (the client's side).",
            unit="reqps",
            queries=(
                Query(expression=zero_if_quiet(f"sum({failed})", total), legend="5xx"),
                Query(expression=zero_if_quiet(f"sum({refused})", total), legend="4xx"),
            ),
            columns=6,
        ),
    )


def _latency(series: JobSeries) -> tuple[Graph, ...]:
    latency = "headrace_router_request_seconds"
    return (
        Graph(
            title="Request latency",
            description="From a request's arrival at the router to its last byte. Empty while nothing ends.",
            unit="s",
            queries=(
                Query(expression=series.quantile(0.5, latency), legend="p50"),
                Query(expression=series.quantile(0.95, latency), legend="p95"),
            ),
            columns=12,
        ),
        Graph(
            title="First byte, p95",
            description="From a request's arrival at the router to the first byte of its answer. "
            "Empty while nothing starts.",
            unit="s",
            queries=(Query(expression=series.quantile(0.95, "headrace_router_first_byte_seconds"), legend="p95"),),
            columns=12,
        ),
    )


def _engine_load(series: JobSeries) -> tuple[Graph, ...]:
    return (
        Graph(
            title="Requests in the engines",
            description="Running: in execution batches. Waiting: queued in an engine, "
            "those that wait for KV from elsewhere included.",
            unit="short",
            queries=(
                Query(
                    expression=f"sum by (role) ({series.gauge('vllm:num_requests_running')})",
                    legend="{{role}} running",
                ),
                Query(
                    expression=f"sum by (role) ({series.gauge('vllm:num_requests_waiting')})",
                    legend="{{role}} waiting",
                ),
            ),
            columns=8,
        ),
        Graph(
            title="Generated tokens",
            description="Tokens generated per second, by role.",
            unit="suffix: tok/s",
            queries=(
                Query(
                    expression=f"sum by (role) ({series.rate('vllm:generation_tokens_total')})",
                    legend="{{role}}",
                ),
            ),
            columns=8,
        ),
        Graph(
            title="Prompt tokens",
            description="Prompt tokens taken in per second, cached ones included. A split request counts once "
            "in each role, so the roles do not add up.",
            unit="suffix: tok/s",
            queries=(
                Query(
                    expression=f"sum by (role) ({series.rate('vllm:prompt_tokens_total')})",
                    legend="{{role}}",
                ),
            ),
            columns=8,
        ),
    )


def _engine_caches(series: JobSeries) -> tuple[Graph, ...]:
    usage = series.gauge("vllm:kv_cache_usage_perc")
    hits = f"sum by (role) ({series.rate('vllm:prefix_cache_hits_total')})"
    queries = f"sum by (role) ({series.rate('vllm:prefix_cache_queries_total')})"
    # On a decode engine the same counter also holds the tokens handed over by a prefill engine.
    pool_hits = series.rate("vllm:external_prefix_cache_hits_total", 'role!="decode"')
    return (
        Graph(
            title="KV cache in use",
            description="Share of the engines' own KV cache: the fullest engine and the mean, by role.",
            unit="percentunit",
            queries=(
                Query(expression=f"max by (role) ({usage})", legend="{{role}} fullest"),
                Query(expression=f"avg by (role) ({usage})", legend="{{role}} mean"),
            ),
            columns=8,
            top=1.0,
        ),
        Graph(
            title="Local prefix hit rate",
            description="Share of looked-up tokens found in the engine's own cache. Empty while nothing is looked up.",
            unit="percentunit",
            queries=(Query(expression=f"{hits} / {queries}", legend="{{role}}"),),
            columns=8,
            top=1.0,
        ),
        Graph(
            title="Prefix hits from the pool",
            description="Prompt tokens per second whose KV was read from the pool. Decode engines are left out: "
            "their counter includes the tokens handed over by prefill engines.",
            unit="suffix: tok/s",
            queries=(Query(expression=f"sum by (role) ({pool_hits})", legend="{{role}}"),),
            columns=8,
        ),
    )


def _pool_content(series: JobSeries) -> tuple[Graph, ...]:
    return (
        Graph(
            title="Pool memory",
            description="In use, mounted by the storage clients, and planned. Mounted below planned: "
            "a storage client is missing.",
            unit="bytes",
            queries=(
                Query(expression=f"max({series.gauge('master_allocated_bytes')})", legend="in use"),
                Query(expression=f"max({series.gauge('master_total_capacity_bytes')})", legend="mounted"),
                Query(expression=f"max({series.gauge('headrace_plan_pool_bytes')})", legend="planned"),
            ),
            columns=12,
        ),
        Graph(
            title="Pool keys",
            description="Keys that the master manages.",
            unit="short",
            queries=(Query(expression=f"max({series.gauge('master_key_count')})", legend="keys"),),
            columns=12,
        ),
    )


def _pool_traffic(series: JobSeries) -> tuple[Graph, ...]:
    handed_over = f"sum({series.sum_rate('vllm:nixl_bytes_transferred')})"
    # Engines without a NIXL connector do not have the series at all.
    any_engine = f"sum({series.rate('vllm:prompt_tokens_total')})"
    return (
        Graph(
            title="Evictions and refused writes",
            description="Keys evicted, and writes refused because no memory could be had. Refused writes: "
            "the pool is too small for its lease time and write rate.",
            unit="suffix: /s",
            queries=(
                Query(expression=f"sum({series.rate('master_evicted_key_count')})", legend="keys evicted"),
                Query(
                    expression=f"sum({series.rate('master_put_start_alloc_failures_total')})",
                    legend="writes refused",
                ),
            ),
            columns=12,
        ),
        Graph(
            title="Prefill to decode by NIXL",
            description="Bytes of KV that decode engines read from prefill engines. "
            "Zero on a job without a handoff between engines.",
            unit="Bps",
            queries=(Query(expression=zero_if_quiet(handed_over, any_engine), legend="handed over"),),
            columns=12,
        ),
    )


def _router_load(series: JobSeries) -> tuple[Graph, ...]:
    per_replica = (
        (
            "Legs in flight",
            "Engine legs sent and not finished, by replica.",
            "headrace_router_legs_in_flight",
        ),
        (
            "Active sessions",
            "Sessions pinned to each replica; what sticky_least_loaded balances first.",
            "headrace_router_active_sessions",
        ),
        (
            "Tokens in flight",
            "Tokens of the legs in flight, by replica; what sticky_least_loaded balances second.",
            "headrace_router_tokens_in_flight",
        ),
    )
    return tuple(
        Graph(
            title=title,
            description=description,
            unit="short",
            queries=(Query(expression=f"sum by (replica) ({series.gauge(name)})", legend="{{replica}}"),),
            columns=8,
        )
        for title, description, name in per_replica
    )


def _router_line(series: JobSeries) -> tuple[Graph, ...]:
    return (
        Graph(
            title="Requests served and waiting",
            description="Being served: given a leg and not over. Waiting: in line, because the gate is closed, "
            "no replica has room, or the weight version asked for is not there yet.",
            unit="short",
            queries=(
                Query(expression=f"sum({series.gauge('headrace_router_requests_admitted')})", legend="being served"),
                Query(expression=f"sum({series.gauge('headrace_router_requests_waiting')})", legend="waiting"),
            ),
            columns=8,
        ),
        Graph(
            title="Why legs go where they go",
            description="pinned: where the session was. new: its first. moved: elsewhere, because waiting cost more, "
            "or the replica had no room, failed or is gone. unpinned: the policy keeps no sessions.",
            unit="suffix: /s",
            queries=(
                Query(
                    expression=f"sum by (role, reason) ({series.rate('headrace_router_choices_total')})",
                    legend="{{role}} {{reason}}",
                ),
            ),
            columns=8,
        ),
        Graph(
            title="Weight epoch",
            description="The epoch that each replica has confirmed; -1: none, and nothing is sent there.",
            unit="short",
            queries=(
                Query(
                    expression=f"max by (replica) ({series.gauge('headrace_router_replica_epoch')})",
                    legend="{{replica}}",
                ),
            ),
            columns=8,
        ),
    )


def _router_outcomes(series: JobSeries) -> tuple[Graph, ...]:
    total = f"sum({series.rate('headrace_router_requests_total')})"
    handoffs = f"sum by (outcome) ({series.rate('headrace_router_handoffs_total')})"
    return (
        Graph(
            title="Handoffs",
            description="Handoffs from prefill to decode, by outcome. Zero on a job that does not split requests.",
            unit="suffix: /s",
            queries=(Query(expression=zero_if_quiet(handoffs, total), legend="{{outcome}}"),),
            columns=8,
        ),
        Graph(
            title="Legs",
            description="Finished engine legs by role and outcome.",
            unit="suffix: /s",
            queries=(
                Query(
                    expression=f"sum by (role, outcome) ({series.rate('headrace_router_legs_total')})",
                    legend="{{role}} {{outcome}}",
                ),
            ),
            columns=8,
        ),
        Graph(
            title="Retries and lost clients",
            description="Further attempts after a failed one, requests whose client left before the end, "
            "and requests put back in line for an update.",
            unit="suffix: /s",
            queries=(
                Query(expression=f"sum({series.rate('headrace_router_retries_total')})", legend="retries"),
                Query(expression=f"sum({series.rate('headrace_router_client_gone_total')})", legend="clients gone"),
                Query(expression=f"sum({series.rate('headrace_router_readmitted_total')})", legend="put back in line"),
            ),
            columns=8,
        ),
        Graph(
            title="Audits",
            description="Requests that were replayed without cache. disagrees: stale or corrupt KV. unsteady: replays "
            "differ too much to judge. skipped: their epoch has gone, or they cannot be asked again.",
            unit="suffix: /s",
            queries=(
                Query(
                    expression=f"sum by (outcome) ({series.rate('headrace_router_audits_total')})", legend="{{outcome}}"
                ),
            ),
            columns=8,
        ),
    )
