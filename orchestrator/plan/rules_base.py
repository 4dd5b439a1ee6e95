"""What every rule of `check.py` is given, and how it answers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from connectors.types import EngineAbilities
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.placement import Placed
from orchestrator.plan.resolve import RoleConfig
from orchestrator.plan.types import Finding
from orchestrator.spec.job import JobSpec
from orchestrator.spec.offload import MooncakeOffload


@dataclass(frozen=True, kw_only=True)
class PooledRole:
    """A role that joins the pool."""

    config: RoleConfig
    offload: MooncakeOffload

    @property
    def name(self) -> str:
        return self.config.role

    @property
    def lends(self) -> bool:
        return self.offload.cpu.num_bytes > 0


@dataclass(frozen=True, kw_only=True)
class CheckInput:
    spec: JobSpec
    roles: Sequence[RoleConfig]
    placed: Sequence[Placed]
    facts: ClusterFacts
    abilities: EngineAbilities

    @property
    def pooled(self) -> list[PooledRole]:
        return [
            PooledRole(config=role, offload=role.offload)
            for role in self.roles
            if isinstance(role.offload, MooncakeOffload)
        ]

    @property
    def split(self) -> list[RoleConfig]:
        """The roles that hand KV to one another."""
        return [role for role in self.roles if role.role != "colocated"]


def error(field: str, problem: str, mend: str) -> Finding:
    return Finding(severity="error", field=field, problem=problem, mend=mend)


def warning(field: str, problem: str, mend: str) -> Finding:
    return Finding(severity="warning", field=field, problem=problem, mend=mend)


def offload_field(given: CheckInput, role: RoleConfig, *path: str) -> str:
    """Where the job file sets this value of a role's offload block."""
    own = getattr(given.spec.roles, role.role).kv_offload
    for part in path:
        own = own.get(part) if isinstance(own, Mapping) else None
    block = "kv_offload" if own is None else f"roles.{role.role}.kv_offload"
    return ".".join([block, *path])


def shown(value: object) -> str:
    return "vLLM's default" if value is None else repr(value)


def is_local(host: object) -> bool:
    """Whether an address reaches nobody but the machine that dials it: loopback, or "every interface"."""
    if not isinstance(host, str):
        return False
    if host == "localhost" or host.startswith(("localhost.", "127.")):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
