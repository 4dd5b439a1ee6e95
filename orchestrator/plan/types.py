"""The plan: everything about a job that can be decided before anything runs. Frozen, complete, serialisable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, TypeAdapter

from connectors.types import Choice, Role
from deploy.unit import LaunchUnit, PlannedFile
from orchestrator.plan.audit import AuditPlan
from orchestrator.plan.port_map import PortBlocks
from orchestrator.plan.weights import WeightsPlan
from orchestrator.spec.difference import asked_for
from orchestrator.spec.job import JobSpec

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a plan that a user should know. An error keeps it from being started."""

    severity: Severity
    field: str
    problem: str
    mend: str


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """One replica: one vLLM server and its ranks."""

    name: str
    role: Role
    node: str
    url: str
    gpus: tuple[str, ...]
    """Their ids, as CUDA_VISIBLE_DEVICES takes them."""
    ranks: int
    """Processes that each hold their part of the weights."""
    cores: tuple[tuple[int, ...], ...]
    """Per rank, where engines are bound to cores."""
    joins_pool: bool
    token_file: str
    """With the bearer token that its fence asks for on every route."""


@dataclass(frozen=True, kw_only=True)
class StorageClientPlan:
    name: str
    node: str
    segment_bytes: int
    address: str
    name_ports: tuple[int, int]
    """(first, end) of the ports of which one names its memory at the master, `end` excluded."""


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    master_address: str
    """host:port"""
    metrics_url: str | None
    """Of the master's own metrics; None where the job joins a master it does not run."""
    cache_prefix: str
    epoch_keys: bool
    """Each epoch's KV has keys of its own and can be purged alone; not where an engine has a stock store connector."""
    python: str
    """An interpreter that has the pool's client."""
    capacity_bytes: int
    """What this job's storage clients lend."""
    clients: tuple[StorageClientPlan, ...]


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    url: str
    """For rollout clients."""
    internal_url: str
    config_file: str
    token_file: str


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    job: str
    spec: Annotated[JobSpec, PlainSerializer(asked_for, return_type=dict[str, Any])]
    """What it was made from; written down without the defaults."""
    model_name: str
    """What a request may say in "model"."""
    vllm_version: str
    units: tuple[LaunchUnit, ...]
    files: tuple[PlannedFile, ...]
    socket_dir: Path
    """With the engines' unix sockets, each engine's in a folder of its own."""
    engines: tuple[EnginePlan, ...]
    pool: PoolPlan | None
    router: RouterPlan
    weights: WeightsPlan
    audit: AuditPlan
    prometheus_url: str | None
    ports: PortBlocks
    """By what they are for; router.port comes on top."""
    offload_probe: Literal["fail", "warn", "off"]
    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]

    @property
    def fleet(self) -> Mapping[str, Role]:
        """Its engines by name."""
        return {engine.name: engine.role for engine in self.engines}

    @property
    def wipes_pool(self) -> bool:
        """Older epochs leave the pool with all that it has, since nothing tells their keys apart."""
        return self.pool is not None and not self.pool.epoch_keys

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")


_PLAN: TypeAdapter[JobPlan] = TypeAdapter(JobPlan)


def plan_to_json(plan: JobPlan) -> str:
    """The plan as JSON text; equal plans give equal text."""
    return _PLAN.dump_json(plan, indent=2).decode() + "\n"


def plan_from_json(text: str) -> JobPlan:
    return _PLAN.validate_json(text)
