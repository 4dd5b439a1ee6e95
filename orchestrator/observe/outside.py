"""What router and master say of a running job's processes, which no look at the processes themselves tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from connectors.engine_client import EngineCallFailed, EngineClient
from connectors.store_argv import SEGMENT_METRIC
from orchestrator.plan.types import EnginePlan, JobPlan
from orchestrator.weights.router_client import RouterCallFailed, RouterClient
from router.core.fleet import ReplicaView

CALL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Outside:
    """None: it did not answer."""

    replicas: Mapping[str, ReplicaView] | None
    """The router's, by name."""
    segments: frozenset[tuple[str, int]] | None
    """(host, port) of the memory that the master counts."""


def look_outside(plan: JobPlan) -> Outside:
    """Blocking, some seconds at most."""
    return Outside(replicas=replicas_of(plan), segments=_segments(plan))


def replicas_of(plan: JobPlan) -> Mapping[str, ReplicaView] | None:
    try:
        with RouterClient(plan.router) as router:
            return router.replicas()
    except RouterCallFailed:
        return None


def let_handoffs_end(engine: EnginePlan, limit_s: float) -> None:
    """Pause a prefill engine that gets no requests any more: it answers once every handoff was fetched or is too old.
    Nobody else commands it meanwhile, so this follows whatever it was told last. One that does not answer is no reason
    to wait: what it has handed over is lost in any case."""
    try:
        with EngineClient(engine.url, engine.token_file) as client:
            fence = client.fence()
            client.pause(fence.instance, fence.next_order(), limit_s, drops_handoffs=False)
    except EngineCallFailed:
        return


def _segments(plan: JobPlan) -> frozenset[tuple[str, int]] | None:
    if plan.pool is None or plan.pool.metrics_url is None:
        return None
    try:
        reply = httpx.get(plan.pool.metrics_url, timeout=CALL_S, trust_env=False).raise_for_status()
        families = [*text_string_to_metric_families(reply.text)]
    except (httpx.HTTPError, ValueError):
        return None
    samples = (sample for family in families for sample in family.samples if sample.name == SEGMENT_METRIC)
    return frozenset(_address(sample.labels.get("segment", "")) for sample in samples if sample.value > 0)


def _address(segment: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{segment}")
        return parts.hostname or "", parts.port or 0
    except ValueError:
        return segment, 0
