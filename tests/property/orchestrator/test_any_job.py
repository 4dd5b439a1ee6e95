"""Whatever a job file says: it is refused with words, or its plan is safe."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.types import JsonDict
from orchestrator.errors import Complaint, PlanRefused
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import JobPlan, plan_from_json, plan_to_json
from orchestrator.spec.job import JobSpec
from tests.unit.orchestrator.samples import CPU, GPU, GPU_OLD, MODEL, facts_of, node, spec_of

ROLES = ("prefill", "decode", "colocated")

sizes = st.sampled_from([0, 1, 2**20, 2**30, 2**40])
blocks = st.one_of(
    st.just("none"),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["mooncake", "native"]), "cpu": st.fixed_dictionaries({"num_bytes": sizes})},
        optional={"disk": st.sampled_from([{"path": "/a"}, {"path": "/b"}])},
    ),
)
role_blocks = st.one_of(
    blocks,
    st.just("inherit"),
    st.fixed_dictionaries({}, optional={"cpu": st.fixed_dictionaries({"num_bytes": sizes}), "lease_ttl": st.just(5)}),
)
engines = st.dictionaries(
    st.sampled_from(["tensor_parallel_size", "data_parallel_size", "block_size", "max_num_seqs"]),
    st.sampled_from([1, 2, 32]),
)
environments = st.dictionaries(st.sampled_from(["A", "VLLM_KV_CACHE_LAYOUT", "PYTHONHASHSEED"]), st.sampled_from("01"))
role_tables = st.fixed_dictionaries(
    {}, optional={"replicas": st.integers(1, 5), "engine": engines, "kv_offload": role_blocks, "env": environments}
)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    fleets = st.one_of(
        st.fixed_dictionaries({"prefill": role_tables, "decode": role_tables}),
        st.fixed_dictionaries({"colocated": role_tables}),
        st.dictionaries(st.sampled_from(ROLES), role_tables),
    )
    data: JsonDict = {
        "name": draw(st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)),
        "model": {"path": MODEL},
        "roles": draw(fleets),
        "engine": draw(engines),
        "env": draw(environments),
        "kv_offload": draw(blocks),
        "router": {"port": draw(st.integers(1, 65535))},
        "launch": {"share_gpus": draw(st.booleans())},
        "monitoring": {"enabled": False},
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "trainer_storage": st.fixed_dictionaries({"num_bytes": st.integers(1, 2**40)}),
        "ports": st.fixed_dictionaries({"base": st.integers(1024, 32767)}),
        "pool": st.sampled_from([{"master": "10.0.9.9:1"}, {"lease_ttl": "1s"}, {"protocol": "rdma"}]),
        "weights": st.just({}),
    }
    for key, strategy in optional.items():
        if draw(st.booleans()):
            data[key] = draw(strategy)
    return spec_of(data)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterFacts:
    shapes = st.tuples(st.integers(0, 12), st.sampled_from([0, 1, 4, 8]), st.sampled_from([8, 2000]))
    nodes = [
        node(index, cores=cores, gpus=gpus, gib=gib)
        for index, (cores, gpus, gib) in enumerate(draw(st.lists(shapes, min_size=1, max_size=4)))
    ]
    return facts_of(
        *nodes,
        abilities=draw(st.sampled_from([CPU, GPU, GPU_OLD, None])),
        attention=draw(st.sampled_from(["full", "mla", "other"])),
        reserved_ports=frozenset(draw(st.sets(st.integers(10240, 32767), max_size=20))),
    )


def check_ports(plan: JobPlan, facts: ClusterFacts) -> None:
    for place in facts.nodes:
        used: Counter[int] = Counter()
        for unit in plan.units:
            if unit.node != place.name:
                continue
            used.update(port.port for port in unit.ports)
            if "MC_MIN_RPC_PORT" in unit.env:
                first, last = int(unit.env["MC_STORE_CLIENT_MIN_PORT"]), int(unit.env["MC_MAX_RPC_PORT"])
                used.update(range(first, last + 1))
        router = {port.port for unit in plan.units if unit.name == "router" for port in unit.ports[:1]}
        assert max(used.values(), default=1) == 1
        assert facts.reserved_ports.isdisjoint(set(used) - router)
        assert all(1024 <= port < 32768 for port in set(used) - router)


def check_gpus(plan: JobPlan, spec: JobSpec) -> None:
    used = Counter((engine.node, gpu) for engine in plan.engines for gpu in engine.gpus)
    for engine in plan.engines:
        assert len(set(engine.gpus)) == len(engine.gpus)
    if not spec.launch.share_gpus:
        assert max(used.values(), default=1) == 1


def check_order(plan: JobPlan) -> None:
    """Master, then storage clients, then engines, then the router; each needs what is before it."""
    stage = {unit.name: unit.start_stage for unit in plan.units}
    assert len(stage) == len(plan.units)
    clients = plan.pool.clients if plan.pool else ()
    for client in clients:
        assert (
            stage.get("mooncake-master", -1) < stage[client.name] < min(stage[engine.name] for engine in plan.engines)
        )
    assert all(stage[engine.name] < stage["router"] for engine in plan.engines)
    masters = sum(name == "mooncake-master" for name in stage)
    assert masters == (1 if plan.pool is not None and plan.pool.metrics_url is not None else 0)


def check_pool(plan: JobPlan) -> None:
    if plan.pool is None:
        assert not any(engine.joins_pool for engine in plan.engines)
        return
    assert plan.pool.capacity_bytes == sum(client.segment_bytes for client in plan.pool.clients)
    assert all(client.segment_bytes > 0 for client in plan.pool.clients)


def outcome(spec: JobSpec, facts: ClusterFacts) -> tuple[JobPlan | None, tuple[Complaint, ...]]:
    try:
        return build_plan(spec, facts), ()
    except PlanRefused as refused:
        return None, refused.complaints


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), clusters())
def test_any_job_is_refused_with_words_or_planned_safely(spec: JobSpec, facts: ClusterFacts) -> None:
    plan, complaints = outcome(spec, facts)
    assert all(complaint.field and complaint.problem for complaint in complaints)
    if plan is None:
        assert complaints
        return
    assert all(finding.field and finding.problem and finding.mend for finding in plan.findings)
    check_ports(plan, facts)
    check_gpus(plan, spec)
    check_order(plan)
    check_pool(plan)
    text = plan_to_json(plan)
    assert text == plan_to_json(build_plan(spec, facts))
    assert plan_from_json(text) == plan


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), clusters())
def test_a_plan_that_may_start_keeps_the_rules_of_a_shared_pool(spec: JobSpec, facts: ClusterFacts) -> None:
    try:
        plan = build_plan(spec, facts)
        refuse_errors(plan)
    except PlanRefused:
        return
    roles = {engine.role for engine in plan.engines}
    assert roles in ({"prefill", "decode"}, {"colocated"})
    environments = [unit.env for unit in plan.units if "PYTHONHASHSEED" in unit.env]
    assert len(environments) == len(plan.engines)
    assert {env["PYTHONHASHSEED"] for env in environments} == {"0"}
    assert len({env["VLLM_RPC_BASE_PATH"] for env in environments}) == len(environments)
    assert len({env.get("VLLM_KV_CACHE_LAYOUT") for env in environments}) == 1
    disks = {unit.env.get("MOONCAKE_OFFLOAD_FSDIR") for unit in plan.units} - {None}
    assert len(disks) <= 1
