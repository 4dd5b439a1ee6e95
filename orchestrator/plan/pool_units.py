"""The pool's own processes as launch units: the master, and a storage client per node and role that lends capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connectors import store_argv
from connectors.engine_env import UNSET_FOR_STORE
from connectors.layout import LAYOUT_VARIABLES
from connectors.mooncake import TRANSFER_PORTS_PER_CLIENT, derive_cache_prefix, transfer_port_ranges
from connectors.types import EngineAbilities
from deploy.unit import LaunchUnit, ListenPort, ListenProbe, MetricProbe, PortRange
from orchestrator.plan.addresses import url_host
from orchestrator.plan.facts import ClusterFacts, NodeFacts
from orchestrator.plan.kinds import MASTER
from orchestrator.plan.placement import Placed
from orchestrator.plan.port_map import PORTS_SETTING, PortMap
from orchestrator.plan.resolve import RoleConfig
from orchestrator.plan.types import PoolPlan, StorageClientPlan
from orchestrator.spec.job import JobSpec
from orchestrator.spec.offload import DiskTier, MooncakeOffload

MASTER_READY_S = 30.0
PIN_S_PER_TIB = 140.0
"""A storage client serves once its memory is pinned: about 70 s per TB on a large host; twice that is allowed."""
STAGE_MASTER, STAGE_STORAGE, STAGE_ENGINES, STAGE_FRONT = range(4)


@dataclass(frozen=True, kw_only=True)
class Lender:
    """One storage client to be: who lends, where, how much."""

    name: str
    node: NodeFacts
    num_bytes: int
    disk: DiskTier | None
    role: RoleConfig | None
    """Whose block it is; None: the trainer's."""


@dataclass(frozen=True, kw_only=True)
class PoolUnits:
    plan: PoolPlan
    units: tuple[LaunchUnit, ...]
    lenders: tuple[Lender, ...]

    @property
    def disk_tier(self) -> bool:
        return any(lender.disk is not None for lender in self.lenders)


def plan_pool(
    spec: JobSpec,
    roles: Sequence[RoleConfig],
    engines: Sequence[Placed],
    facts: ClusterFacts,
    abilities: EngineAbilities,
    ports: PortMap,
) -> PoolUnits | None:
    """The pool of a job whose roles use one; None where none does."""
    pooled = [role for role in roles if isinstance(role.offload, MooncakeOffload)]
    if not pooled:
        return None
    head = facts.nodes[0]
    bind_host = head.address if len(facts.nodes) == 1 else "0.0.0.0"
    lenders = _find_lenders(spec, pooled, engines, facts)
    units: list[LaunchUnit] = []
    master_address, metrics_url = spec.pool.master, None
    if master_address is None:
        settings = store_argv.MasterSettings(
            program=abilities.mooncake_master or "mooncake_master",
            bind_host=bind_host,
            rpc_port=ports.one(head.name, f"{MASTER} rpc"),
            metrics_port=ports.one(head.name, f"{MASTER} metrics"),
            lease_ttl_s=lease_ttl_s(spec, pooled),
            disk_tier=any(lender.disk is not None for lender in lenders),
            extra_flags=spec.pool.master_flags,
        )
        master_address = f"{url_host(head.address)}:{settings.rpc_port}"
        metrics_url = f"http://{url_host(head.address)}:{settings.metrics_port}/metrics"
        units.append(_master_unit(spec, head, settings, facts))
    mounted = 0
    clients = []
    for lender in lenders:
        mounted += lender.num_bytes
        unit = _client_unit(spec, lender, master_address, metrics_url, mounted, facts, abilities, ports)
        units.append(unit)
        clients.append(_client_plan(lender, unit))
    plan = PoolPlan(
        master_address=master_address,
        metrics_url=metrics_url,
        cache_prefix=spec.pool.cache_prefix
        or derive_cache_prefix(spec.name, _identity(spec, pooled, facts, abilities)),
        epoch_keys=spec.weights is not None and all(role.transfer_override is None for role in pooled),
        python=abilities.python,
        capacity_bytes=mounted,
        clients=tuple(clients),
    )
    return PoolUnits(plan=plan, units=tuple(units), lenders=tuple(lenders))


def _find_lenders(
    spec: JobSpec, pooled: Sequence[RoleConfig], engines: Sequence[Placed], facts: ClusterFacts
) -> list[Lender]:
    """A client per role and node of the role where capacity is lent, then the trainer's nodes."""
    lenders: list[Lender] = []
    for role in pooled:
        assert isinstance(role.offload, MooncakeOffload)
        if role.offload.cpu.num_bytes == 0:
            continue
        nodes = dict.fromkeys(engine.node for engine in engines if engine.role.role == role.role)
        for index, node in enumerate(nodes):
            name = f"storage-{role.role}-{index}"
            amount = int(role.offload.cpu.num_bytes)
            lenders.append(Lender(name=name, node=node, num_bytes=amount, disk=role.offload.disk, role=role))
    if spec.trainer_storage is not None:
        amount = int(spec.trainer_storage.num_bytes)
        names = spec.trainer_storage.nodes or (facts.nodes[0].name,)
        for index, node in enumerate(node for node in facts.nodes if node.name in names):
            name = f"storage-trainer-{index}"
            lenders.append(Lender(name=name, node=node, num_bytes=amount, disk=None, role=None))
    return lenders


def lease_ttl_s(spec: JobSpec, pooled: Sequence[RoleConfig]) -> float:
    """The one lease of the master; `check.py` refuses two."""
    named = [role.offload.lease_ttl for role in pooled if isinstance(role.offload, MooncakeOffload)]
    return next((lease for lease in named if lease is not None), spec.pool.lease_ttl)


def _identity(
    spec: JobSpec, pooled: Sequence[RoleConfig], facts: ClusterFacts, abilities: EngineAbilities
) -> dict[str, object]:
    """Everything that makes the KV of two runs incompatible though their keys look alike (A20)."""
    engine = pooled[0].engine
    # On a master that others use too, a job of the same name elsewhere is another job.
    owner = () if spec.pool.master is None else (facts.nodes[0].address, str(facts.job_dir))
    names = ("dtype", "kv_cache_dtype", "block_size", "quantization", "hf_overrides", "tensor_parallel_size")
    return {
        "model": facts.model.location,
        "revision": spec.model.revision,
        "files": facts.model.fingerprint,
        **({"owner": owner} if owner else {}),
        **{name: engine.get(name) for name in names},
        "layout": (
            abilities.vllm_version,
            abilities.platform,
            *(pooled[0].env.get(name) for name in LAYOUT_VARIABLES),
        ),
    }


def store_port_ranges(first: int, count: int) -> tuple[PortRange, ...]:
    """The ports of store clients, as ranges that must have room for what they take."""
    return tuple(
        PortRange(name=ports.name, first=ports.first, count=ports.count, needed=ports.needed, setting=PORTS_SETTING)
        for ports in transfer_port_ranges(first, count)
    )


def _master_unit(
    spec: JobSpec, head: NodeFacts, settings: store_argv.MasterSettings, facts: ClusterFacts
) -> LaunchUnit:
    return LaunchUnit(
        name=MASTER,
        node=head.name,
        argv=store_argv.master_argv(settings),
        unset_env=UNSET_FOR_STORE,
        cwd=facts.job_dir,
        ports=(
            ListenPort(name="rpc", port=settings.rpc_port, setting=PORTS_SETTING),
            ListenPort(name="metrics", port=settings.metrics_port, setting=PORTS_SETTING),
        ),
        probe=ListenProbe(port=settings.rpc_port),
        start_stage=STAGE_MASTER,
        ready_timeout_s=MASTER_READY_S,
        stop_grace_s=spec.launch.stop_grace,
    )


def _client_plan(lender: Lender, unit: LaunchUnit) -> StorageClientPlan:
    names, _ = unit.port_ranges
    return StorageClientPlan(
        name=lender.name,
        node=lender.node.name,
        segment_bytes=lender.num_bytes,
        address=lender.node.address,
        name_ports=(names.first, names.first + names.count),
    )


def _client_unit(
    spec: JobSpec,
    lender: Lender,
    master_address: str,
    metrics_url: str | None,
    mounted: int,
    facts: ClusterFacts,
    abilities: EngineAbilities,
    ports: PortMap,
) -> LaunchUnit:
    """`mounted`: capacity at the master once this client and those before it are up."""
    settings = store_argv.ClientSettings(
        program=abilities.mooncake_client or "mooncake_client",
        host=lender.node.address,
        port=ports.one(lender.node.name, f"{lender.name} service"),
        transfer_ports=ports.block(lender.node.name, f"{lender.name} transfers", TRANSFER_PORTS_PER_CLIENT),
        master_address=master_address,
        protocol=spec.pool.protocol,
        device_names=spec.pool.device_names,
        segment_bytes=lender.num_bytes,
        disk_path=lender.disk.path if lender.disk else None,
        disk_bytes=int(lender.disk.num_bytes) if lender.disk and lender.disk.num_bytes else None,
    )
    probe: MetricProbe | ListenProbe = ListenProbe(port=settings.port)
    if metrics_url is not None:
        probe = MetricProbe(url=metrics_url, metric=store_argv.CAPACITY_METRIC, at_least=float(mounted))
    return LaunchUnit(
        name=lender.name,
        node=lender.node.name,
        argv=store_argv.client_argv(settings),
        env=store_argv.client_environment(settings),
        unset_env=UNSET_FOR_STORE,
        cwd=facts.job_dir,
        ports=(ListenPort(name="service", port=settings.port, setting=PORTS_SETTING),),
        port_ranges=store_port_ranges(*settings.transfer_ports),
        probe=probe,
        start_stage=STAGE_STORAGE,
        ready_timeout_s=MASTER_READY_S + PIN_S_PER_TIB * lender.num_bytes / 2**40,
        stop_grace_s=spec.launch.stop_grace,
    )
