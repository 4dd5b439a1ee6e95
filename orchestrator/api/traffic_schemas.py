"""Wire models of what passes through a router. The page shows it beside the processes that `schemas.py` tells of."""

from __future__ import annotations

from typing import Literal

from connectors.types import Role
from orchestrator.api.wire import WireModel
from orchestrator.weights.router_client import RouterTraffic
from router.core.fleet import ReplicaView
from router.core.gate import GateState

_REPLICA = {
    "name": "prefill-0",
    "role": "prefill",
    "epoch": 3,
    "is_usable": True,
    "is_draining": False,
    "breaker": "closed",
    "active_sessions": 12,
    "legs_in_flight": 2,
    "tokens_in_flight": 1830,
    "handoffs_failed": 0,
}
TRAFFIC = {
    "router": {
        "gate": "open",
        "sessions": 12,
        "waiting": 0,
        "admitted": 4,
        "replicas": [_REPLICA, {**_REPLICA, "name": "decode-0", "role": "decode"}],
    },
    "router_unknown": "",
}


class ReplicaTraffic(WireModel):
    name: str
    role: Role
    epoch: int | None
    """Whose weights it holds; null where nobody has confirmed that yet."""
    is_usable: bool
    """It can be sent requests."""
    is_draining: bool
    breaker: Literal["closed", "open", "trial"]
    """open: it failed too often to be sent any. trial: one is sent, to see."""
    active_sessions: int
    legs_in_flight: int
    """A request has one on its prefill and one on its decode replica."""
    tokens_in_flight: int
    handoffs_failed: int
    """In a row; of a prefill replica."""


class RouterStatus(WireModel):
    gate: GateState
    sessions: int
    waiting: int
    """Requests that no replica was chosen for yet."""
    admitted: int
    """Requests that replicas work on."""
    replicas: list[ReplicaTraffic]


class TrafficStatus(WireModel, json_schema_extra={"examples": [TRAFFIC]}):
    router: RouterStatus | None
    router_unknown: str
    """Why `router` is null; empty where it is not."""


def traffic_status(traffic: RouterTraffic | str) -> TrafficStatus:
    if isinstance(traffic, str):
        return TrafficStatus(router=None, router_unknown=traffic)
    router = RouterStatus(
        gate=traffic.gate,
        sessions=traffic.sessions,
        waiting=traffic.waiting,
        admitted=traffic.admitted,
        replicas=[_replica(each) for each in traffic.replicas],
    )
    return TrafficStatus(router=router, router_unknown="")


def _replica(view: ReplicaView) -> ReplicaTraffic:
    return ReplicaTraffic(
        name=view.name,
        role=view.role,
        epoch=view.epoch,
        is_usable=view.usable,
        is_draining=view.draining,
        breaker=view.breaker,
        active_sessions=view.active_sessions,
        legs_in_flight=view.legs_in_flight,
        tokens_in_flight=view.tokens_in_flight,
        handoffs_failed=view.handoffs_failed,
    )
