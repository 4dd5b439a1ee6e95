"""vLLM engines as launch units, and one `inference-<role>.json` per role.

The file is a record, for people and for whoever starts the role's engines elsewhere; no process of this version reads
it. Each unit's argv is made from the same arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from connectors import engine_argv, engine_env, mooncake
from connectors.chain import ChainParts, NativeTier, transfer_config
from connectors.layout import LayoutChoice
from connectors.nixl import NixlSettings, Reach, ucx_environment
from connectors.types import Choice, EngineAbilities, JsonDict
from deploy.unit import HttpProbe, LaunchUnit, ListenPort, PlannedFile
from orchestrator.plan.addresses import token_file, url_host
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.placement import Placed
from orchestrator.plan.pool_units import STAGE_ENGINES, PoolUnits, store_port_ranges
from orchestrator.plan.port_map import PORTS_SETTING, PortMap
from orchestrator.plan.resolve import RoleConfig
from orchestrator.plan.types import EnginePlan, PoolPlan
from orchestrator.spec.job import JobSpec
from orchestrator.spec.offload import MooncakeOffload, NativeOffload

STORE_FILE = "mooncake.json"


@dataclass(frozen=True, kw_only=True)
class EngineUnits:
    engines: tuple[EnginePlan, ...]
    units: tuple[LaunchUnit, ...]
    files: tuple[PlannedFile, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What all engines of a job have in common."""

    spec: JobSpec
    facts: ClusterFacts
    abilities: EngineAbilities
    pool: PoolPlan | None
    layout: LayoutChoice
    ucx: dict[str, str]
    disk_tier: bool

    @property
    def one_node(self) -> bool:
        return len(self.facts.nodes) == 1


def plan_engines(
    spec: JobSpec,
    roles: Sequence[RoleConfig],
    placed: Sequence[Placed],
    facts: ClusterFacts,
    abilities: EngineAbilities,
    layout: LayoutChoice,
    pool: PoolUnits | None,
    ports: PortMap,
) -> EngineUnits:
    """All engines of the job, and the files they read."""
    ucx, ucx_choice = _ucx(spec, facts, abilities)
    shared = _Shared(
        spec=spec,
        facts=facts,
        abilities=abilities,
        pool=pool.plan if pool else None,
        layout=layout,
        ucx=ucx,
        disk_tier=pool is not None and pool.disk_tier,
    )
    arguments = {role.role: role_arguments(role, shared) for role in roles}
    planned = [_plan_engine(engine, arguments[engine.role.role], shared, ports) for engine in placed]
    files = [_role_file(role, arguments[role.role], facts.job_dir) for role in roles]
    if pool is not None:
        files.append(_store_file(shared, pool.plan))
    files += [_socket_file(facts, engine.name, spec.name) for engine in placed]
    has_nixl = spec.weights is not None or any(role.role != "colocated" for role in roles)
    return EngineUnits(
        engines=tuple(engine for engine, _ in planned),
        units=tuple(unit for _, unit in planned),
        files=tuple(files),
        choices=(ucx_choice,) if has_nixl else (),
    )


def role_arguments(role: RoleConfig, shared: _Shared) -> JsonDict:
    """Every vLLM argument that all replicas of a role share, the chain included."""
    spec = shared.spec
    args: JsonDict = {"model": shared.facts.model.location, **engine_argv.always_arguments(role.role, shared.abilities)}
    if spec.model.served_names:
        args["served_model_name"] = list(spec.model.served_names)
    if spec.model.revision:
        args["revision"] = spec.model.revision
    args |= role.engine
    chain = role.transfer_override
    if chain is None:
        chain = transfer_config(role.role, chain_parts(role, shared), shared.abilities)
    if chain is not None:
        args["kv_transfer_config"] = chain
    if spec.weights is not None:
        args |= engine_argv.WEIGHT_ARGUMENTS
    args["middleware"] = engine_argv.fenced(args.get("middleware"))
    return args


def handoff_lease_s(spec: JobSpec) -> int:
    """Whole seconds, as vLLM counts them; engines and router must go by one number."""
    return int(spec.handoff.lease)


def chain_parts(role: RoleConfig, shared: _Shared) -> ChainParts:
    handoff, store, native = None, None, None
    if role.role != "colocated":
        handoff = NixlSettings(
            lease_s=handoff_lease_s(shared.spec),
            num_threads=shared.spec.handoff.num_threads,
            cross_layers_blocks=shared.layout.cross_layers_blocks,
        )
    if isinstance(role.offload, MooncakeOffload) and shared.pool is not None:
        store = mooncake.StoreSettings(
            cache_prefix=shared.pool.cache_prefix,
            save_decode_cache=role.offload.save_decode_cache and shared.abilities.save_decode_cache,
            cross_layers_blocks=shared.layout.cross_layers_blocks,
            by_epoch=shared.spec.weights is not None,
        )
    if isinstance(role.offload, NativeOffload):
        disk = role.offload.disk
        native = NativeTier(cpu_bytes=int(role.offload.cpu.num_bytes), disk_path=disk.path if disk else None)
    return ChainParts(handoff=handoff, store=store, native=native)


def _ucx(spec: JobSpec, facts: ClusterFacts, abilities: EngineAbilities) -> tuple[dict[str, str], Choice]:
    reach = _reach(spec, one_node=len(facts.nodes) == 1)
    seen = {node.nvlink for node in facts.nodes}
    nvlink = spec.handoff.nvlink if spec.handoff.nvlink is not None else seen.pop() if len(seen) == 1 else None
    return ucx_environment(abilities.platform, reach, nvlink)


def _reach(spec: JobSpec, *, one_node: bool) -> Reach:
    transport = spec.handoff.transport
    if one_node:
        return "rdma" if transport == "rdma" else "loopback"
    if transport != "auto":
        return transport
    return "rdma" if spec.pool.protocol == "rdma" else "any"


@dataclass(frozen=True, kw_only=True)
class _EnginePorts:
    http: int
    side_channel: tuple[int, int] | None
    """(first, count): one per data-parallel rank; None without a handoff."""
    store: tuple[int, int] | None
    """(first, count) for the store clients of all ranks; None outside the pool."""

    @property
    def listens(self) -> tuple[ListenPort, ...]:
        first, count = self.side_channel or (0, 0)
        side_channels = (
            ListenPort(name="side channel", port=first + index, setting=PORTS_SETTING) for index in range(count)
        )
        return (ListenPort(name="http", port=self.http, setting=PORTS_SETTING), *side_channels)


def _plan_engine(placed: Placed, args: JsonDict, shared: _Shared, ports: PortMap) -> tuple[EnginePlan, LaunchUnit]:
    node, sizes = placed.node, placed.role.sizes
    joins_pool = shared.pool is not None and isinstance(placed.role.offload, MooncakeOffload)
    own = _own_ports(placed, ports, joins_pool=joins_pool)
    host = node.address if shared.one_node else "0.0.0.0"
    url = f"http://{url_host(node.address)}:{own.http}"
    token = token_file(shared.facts.job_dir)
    unit = LaunchUnit(
        name=placed.name,
        node=node.name,
        argv=engine_argv.server_argv(shared.abilities.python, {**args, "host": host, "port": own.http}),
        env=_engine_environment(placed, own, shared),
        unset_env=engine_env.UNSET_FOR_ENGINES,
        cwd=shared.facts.job_dir,
        ports=own.listens,
        port_ranges=store_port_ranges(*own.store) if own.store else (),
        probe=HttpProbe(url=f"{url}/health", token_file=token),
        start_stage=STAGE_ENGINES,
        ready_timeout_s=shared.spec.launch.ready_timeout,
        stop_grace_s=shared.spec.launch.stop_grace,
    )
    engine = EnginePlan(
        name=placed.name,
        role=placed.role.role,
        node=node.name,
        url=url,
        gpus=placed.gpus,
        ranks=sizes.ranks,
        cores=placed.cores,
        joins_pool=joins_pool,
        token_file=str(token),
    )
    return engine, unit


def _own_ports(placed: Placed, ports: PortMap, *, joins_pool: bool) -> _EnginePorts:
    name, node, sizes = placed.name, placed.node.name, placed.role.sizes
    has_handoffs = placed.role.role != "colocated"
    store_ports = mooncake.TRANSFER_PORTS_PER_CLIENT * sizes.ranks
    return _EnginePorts(
        http=ports.one(node, f"{name} http"),
        side_channel=ports.block(node, f"{name} side channel", sizes.data) if has_handoffs else None,
        store=ports.block(node, f"{name} store", store_ports) if joins_pool else None,
    )


def _engine_environment(placed: Placed, own: _EnginePorts, shared: _Shared) -> dict[str, str]:
    """In the order of names; what the user set is stronger than what was chosen."""
    env = engine_env.common_environment(
        advertised_host=placed.node.address,
        rpc_dir=str(shared.facts.socket_dir / placed.name),
        side_channel_port=own.side_channel[0] if own.side_channel else None,
        token_file=str(token_file(shared.facts.job_dir)),
    )
    weights = shared.spec.weights
    if own.side_channel is not None or weights is not None:
        env |= shared.ucx
    env |= engine_env.resting_environment(shared.abilities.platform)
    if weights is not None:
        env |= engine_env.weights_environment(
            transport=weights.transport,
            mode=weights.load_mode,
            keep_copy=weights.keep_copy,
            advertised_host=placed.node.address,
        )
    if own.store is not None:
        env |= engine_env.store_environment(
            config_path=str(shared.facts.job_dir / STORE_FILE),
            advertised_host=placed.node.address,
            protocol=shared.spec.pool.protocol,
            ports=own.store,
        )
    if placed.cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = engine_env.cpu_binding(placed.cores)
    if placed.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(placed.gpus)
    env |= placed.role.env
    if shared.abilities.plugin_path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [shared.abilities.plugin_path, env.get("PYTHONPATH")]))
    return dict(sorted(env.items()))


def _role_file(role: RoleConfig, args: JsonDict, job_dir: Path) -> PlannedFile:
    """What every replica of the role gets, apart from its own address and ports."""
    text = json.dumps({"role": role.role, "arguments": args}, indent=2, sort_keys=True) + "\n"
    return PlannedFile(path=job_dir / f"inference-{role.role}.json", text=text)


def _store_file(shared: _Shared, pool: PoolPlan) -> PlannedFile:
    text = mooncake.client_config(
        master_address=pool.master_address,
        protocol=shared.spec.pool.protocol,
        device_names=shared.spec.pool.device_names,
        local_buffer_bytes=int(shared.spec.pool.local_buffer_bytes),
        disk_tier=shared.disk_tier,
    )
    return PlannedFile(path=shared.facts.job_dir / STORE_FILE, text=text)


def _socket_file(facts: ClusterFacts, engine: str, job: str) -> PlannedFile:
    """Makes the folder of an engine's lookup socket; unix socket paths are short, so it cannot lie in the job's own."""
    return PlannedFile(path=facts.socket_dir / engine / "owner.txt", text=f"sockets of {engine} of job {job}\n")
