"""Whether what was placed on each node fits into its memory. Used by `build.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from connectors.types import EngineAbilities
from orchestrator.plan.facts import ClusterFacts, NodeFacts
from orchestrator.plan.placement import Placed
from orchestrator.plan.pool_units import Lender
from orchestrator.plan.types import Finding
from orchestrator.spec.job import JobSpec
from orchestrator.spec.offload import MooncakeOffload, NativeOffload

DISK_STAGING_BYTES = 1280 * 2**20
"""Mooncake's staging buffer of a storage client with a disk tier."""


def memory_findings(
    spec: JobSpec,
    placed: Sequence[Placed],
    lenders: Sequence[Lender],
    facts: ClusterFacts,
    abilities: EngineAbilities,
) -> Iterator[Finding]:
    """One error per node whose processes are promised more memory than it has, with the sum's parts."""
    for node in facts.nodes:
        here = [lender for lender in lenders if lender.node is node]
        parts = [(f"segment of {lender.name}", lender.num_bytes) for lender in here]
        parts += [(f"staging of {lender.name}", DISK_STAGING_BYTES) for lender in here if lender.disk is not None]
        for engine in placed:
            if engine.node is node:
                parts += _engine_parts(engine, spec, facts, abilities)
        total = sum(size for _, size in parts)
        if total > node.memory_bytes:
            yield _too_much(node, parts, total)


def _engine_parts(
    engine: Placed, spec: JobSpec, facts: ClusterFacts, abilities: EngineAbilities
) -> Iterator[tuple[str, int]]:
    offload = engine.role.offload
    if isinstance(offload, MooncakeOffload):
        ranks = engine.role.sizes.ranks
        yield f"store buffers of {engine.name}", int(spec.pool.local_buffer_bytes) * ranks
    if isinstance(offload, NativeOffload):
        yield f"native tier of {engine.name}", int(offload.cpu.num_bytes)
    weights = facts.model.weight_bytes * engine.role.sizes.data
    if spec.weights is not None and spec.weights.load_mode == "cpu_prefetch":
        yield f"prefetched weights of {engine.name}", weights
    if abilities.platform == "cpu":
        yield f"weights of {engine.name}", weights
        kv_bytes = engine.role.engine.get("kv_cache_memory_bytes")
        if isinstance(kv_bytes, int):
            yield f"KV cache of {engine.name}", kv_bytes * engine.role.sizes.ranks


def _too_much(node: NodeFacts, parts: Sequence[tuple[str, int]], total: int) -> Finding:
    largest = sorted(parts, key=lambda part: -part[1])[:4]
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in largest)
    return Finding(
        severity="error",
        field="kv_offload.cpu.num_bytes",
        problem=f"{node.name} has {_gib(node.memory_bytes)}, its processes need {_gib(total)}: {listed}",
        mend="lend less, lower pool.local_buffer_bytes, or place fewer replicas on a node",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
