"""Another number of replicas: what runs is planned as it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.types import JsonDict
from orchestrator.errors import PlanRefused, SpecError
from orchestrator.plan.port_map import ports_of
from orchestrator.plan.scale import replicas_of, scaled_plan
from orchestrator.plan.types import JobPlan, plan_to_json
from tests.unit.orchestrator.samples import facts_of, gpu_facts, node, pd_data, plan_of

TWO_AND_TWO: JsonDict = {
    "roles": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
    "engine": {"kv_cache_memory_bytes": 2**28},
}


@pytest.fixture
def running() -> JobPlan:
    return plan_of(pd_data(**TWO_AND_TWO, monitoring={"enabled": True}))


def file(plan: JobPlan, name: str) -> str:
    return next(file.text for file in plan.files if Path(file.path).name == name)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_what_stays_stays_byte_for_byte(running: JobPlan, role: str, replicas: int) -> None:
    # Others have come meanwhile, also where the job would go on.
    reserved = frozenset(range(max(ports_of(running.ports)) + 1, max(ports_of(running.ports)) + 4))
    plan = scaled_plan(running, role, replicas, facts_of(reserved_ports=reserved))
    before = {unit.name: unit for unit in running.units}
    kept = {unit.name: unit for unit in plan.units if unit.name in before}
    assert kept == {name: before[name] for name in kept}
    assert replicas_of(plan, role) == tuple(f"{role}-{index}" for index in range(replicas))
    assert {unit.name for unit in plan.units} >= {"mooncake-master", "storage-prefill-0", "router", "prometheus"}
    assert (plan.pool, plan.router) == (running.pool, running.router)
    assert reserved.isdisjoint(ports_of(plan.ports))
    assert {engine["name"] for engine in json.loads(file(plan, "router.json"))["engines"]} == {
        target["labels"]["instance"] for target in json.loads(file(plan, "engines.json"))
    }


def test_there_and_back_is_the_same_plan(running: JobPlan) -> None:
    there = scaled_plan(running, "decode", 4, facts_of())
    assert plan_to_json(scaled_plan(there, "decode", 2, facts_of())) == plan_to_json(running)


def test_new_replicas_have_their_sockets_where_those_that_run_do(running: JobPlan) -> None:
    plan = scaled_plan(running, "decode", 4, replace(facts_of(), socket_dir=Path("/other/tmp/hr-demo")))
    folders = {Path(unit.env["VLLM_RPC_BASE_PATH"]) for unit in plan.units if "VLLM_RPC_BASE_PATH" in unit.env}
    assert len(folders) == 6
    assert {folder.parent for folder in folders} == {plan.socket_dir} == {running.socket_dir}


def test_no_port_is_given_twice(running: JobPlan) -> None:
    plan = scaled_plan(scaled_plan(running, "prefill", 3, facts_of()), "decode", 4, facts_of())
    assert len(ports_of(plan.ports)) == sum(count for _, count in plan.ports.values())


def test_new_replicas_take_gpus_that_nobody_has() -> None:
    facts = gpu_facts(node(0, cores=64, gpus=8, gib=1024, address="127.0.0.1"))
    running = plan_of(pd_data(**TWO_AND_TWO), facts)
    assert [engine.gpus for engine in running.engines] == [("0",), ("1",), ("2",), ("3",)]
    plan = scaled_plan(running, "prefill", 4, facts)
    assert {engine.name: engine.gpus for engine in plan.engines} == {
        "prefill-0": ("0",),
        "prefill-1": ("1",),
        "prefill-2": ("4",),
        "prefill-3": ("5",),
        "decode-0": ("2",),
        "decode-1": ("3",),
    }
    back = scaled_plan(scaled_plan(plan, "decode", 1, facts), "prefill", 5, facts)
    assert next(engine.gpus for engine in back.engines if engine.name == "prefill-4") == ("3",)
    with pytest.raises(PlanRefused, match=r"roles.decode.replicas: 9 engines of 1 GPUs do not fit into 8 GPUs"):
        scaled_plan(running, "decode", 9, facts)


def test_a_role_keeps_a_replica(running: JobPlan) -> None:
    with pytest.raises(SpecError, match=r"roles.decode.replicas"):
        scaled_plan(running, "decode", 0, facts_of())


def test_more_of_what_would_not_be_alike_is_refused_and_fewer_are_not(running: JobPlan) -> None:
    other = facts_of(fingerprint="other")
    with pytest.raises(PlanRefused, match=r"roles.decode.replicas: the engine or the model's files have changed"):
        scaled_plan(running, "decode", 3, other)
    assert replicas_of(scaled_plan(running, "decode", 1, other), "decode") == ("decode-0",)
    there = scaled_plan(running, "decode", 1, other)
    with pytest.raises(PlanRefused, match="have changed"):
        scaled_plan(there, "decode", 2, other)


def test_a_node_that_is_called_otherwise_now_is_refused(running: JobPlan) -> None:
    with pytest.raises(PlanRefused, match=r"roles.decode.replicas: engines run on n0, and the nodes are called n1 now"):
        scaled_plan(running, "decode", 3, facts_of(node(1)))
