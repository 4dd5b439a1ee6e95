"""Whether what was placed on each node fits into its memory. Used by `build.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from connectors.engine_env import KV_SPACE_VARIABLE
from orchestrator.plan.facts import NodeFacts
from orchestrator.plan.placement import Placed
from orchestrator.plan.pool_units import Lender
from orchestrator.plan.resolve import engine_field, env_field
from orchestrator.plan.rules_base import CheckInput, error, offload_field
from orchestrator.plan.types import Finding
from orchestrator.spec.offload import MooncakeOffload, NativeOffload

GIB = 2**30
DISK_STAGING_BYTES = 1280 * 2**20
"""Mooncake's staging buffer of a storage client with a disk tier."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Memory that one process is promised, and where the job file says so."""

    name: str
    num_bytes: int
    field: str
    mend: str


def memory_findings(given: CheckInput, lenders: Sequence[Lender]) -> Iterator[Finding]:
    """One error per node whose processes are promised more memory than it has, with the sum's parts."""
    for node in given.facts.nodes:
        parts = [part for lender in lenders if lender.node is node for part in _lender_parts(given, lender)]
        parts += [part for engine in given.placed if engine.node is node for part in _engine_parts(given, engine)]
        if sum(part.num_bytes for part in parts) > node.memory_bytes:
            yield _too_much(node, parts)


def _lender_parts(given: CheckInput, lender: Lender) -> Iterator[_Part]:
    field = "trainer_storage.num_bytes"
    if lender.role is not None:
        field = offload_field(given, lender.role, "cpu", "num_bytes")
    yield _Part(name=f"segment of {lender.name}", num_bytes=lender.num_bytes, field=field, mend="lend less")
    if lender.disk is not None and lender.role is not None:
        field = offload_field(given, lender.role, "disk")
        name = f"staging of {lender.name}"
        yield _Part(name=name, num_bytes=DISK_STAGING_BYTES, field=field, mend="drop the disk tier")


def _engine_parts(given: CheckInput, engine: Placed) -> Iterator[_Part]:
    role, offload = engine.role, engine.role.offload
    if isinstance(offload, MooncakeOffload):
        buffers = int(given.spec.pool.local_buffer_bytes) * role.sizes.ranks
        field = "pool.local_buffer_bytes"
        yield _Part(name=f"store buffers of {engine.name}", num_bytes=buffers, field=field, mend="set it lower")
    if isinstance(offload, NativeOffload):
        field, size = offload_field(given, role, "cpu", "num_bytes"), int(offload.cpu.num_bytes)
        yield _Part(name=f"native tier of {engine.name}", num_bytes=size, field=field, mend="set it lower")
    weights = given.facts.model.weight_bytes * role.sizes.data
    if given.spec.weights is not None and given.spec.weights.load_mode == "cpu_prefetch":
        field, mend = "weights.load_mode", 'set it to "gpu_fetch"'
        yield _Part(name=f"prefetched weights of {engine.name}", num_bytes=weights, field=field, mend=mend)
    if given.abilities.platform == "cpu":
        field, mend = f"roles.{role.role}.replicas", "start fewer"
        yield _Part(name=f"weights of {engine.name}", num_bytes=weights, field=field, mend=mend)
        yield from _kv_part(given, engine)


def _kv_part(given: CheckInput, engine: Placed) -> Iterator[_Part]:
    """Of a CPU engine; a variable of the user's is stronger than the argument."""
    role, name = engine.role, f"KV cache of {engine.name}"
    gib = role.env.get(KV_SPACE_VARIABLE, "")
    kv_bytes = role.engine.get("kv_cache_memory_bytes")
    if gib.isdecimal():
        field = env_field(given.spec, role.role, KV_SPACE_VARIABLE)
        yield _Part(name=name, num_bytes=int(gib) * GIB * role.sizes.ranks, field=field, mend="set it lower")
    elif isinstance(kv_bytes, int):
        field = engine_field(given.spec, role.role, "kv_cache_memory_bytes")
        yield _Part(name=name, num_bytes=kv_bytes * role.sizes.ranks, field=field, mend="set it lower")


def _too_much(node: NodeFacts, parts: Sequence[_Part]) -> Finding:
    largest = sorted(parts, key=lambda part: -part.num_bytes)
    listed = ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in largest[:4])
    total = sum(part.num_bytes for part in parts)
    return error(
        largest[0].field,
        f"{node.name} has {_gib(node.memory_bytes)}, its processes need {_gib(total)}: {listed}",
        f"{largest[0].mend}, or place less on a node",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
