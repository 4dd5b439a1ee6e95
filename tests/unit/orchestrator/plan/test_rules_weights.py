"""What the plug-in for new weights would refuse, refused in the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connectors.types import JsonDict
from tests.unit.orchestrator.samples import CPU, assert_error, facts_of, gpu_facts, pd_data, plan_of

WEIGHTS: JsonDict = {"weights": {}}


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"enable_lora": True}, "adapter"),
        ({"data_parallel_size": 2}, "use more replicas"),
        ({"prefill_context_parallel_size": 2}, "set it to 1"),
        ({"worker_extension_cls": "mine.Extension"}, "decided by [weights]"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "decided by [weights]"),
    ],
)
def test_engines_whose_weights_cannot_be_replaced(engine: dict[str, Any], says: str) -> None:
    (name,) = engine
    assert_error(pd_data(engine=engine, **WEIGHTS), f"engine.{name}", says, "drop [weights]", facts=gpu_facts())
    of_one_role = pd_data(roles={"decode": {"engine": engine}}, **WEIGHTS)
    assert f"roles.decode.engine.{name}" in {found.field for found in plan_of(of_one_role, gpu_facts()).errors}
    assert plan_of(pd_data(engine=engine), gpu_facts()).errors == ()


def test_arguments_that_switch_nothing_on_are_no_mistake() -> None:
    engine = {"enable_lora": False, "data_parallel_size": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert plan_of(pd_data(engine=engine, **WEIGHTS), gpu_facts()).errors == ()


def test_what_the_trainer_sends_is_not_what_a_quantised_engine_holds() -> None:
    says = ("gpu_fetch", "fp8", "cpu_prefetch")
    assert_error(pd_data(**WEIGHTS), "weights.load_mode", *says, facts=facts_of(quantization="fp8"))
    by_argument = pd_data(roles={"decode": {"engine": {"quantization": "fp8"}}}, **WEIGHTS)
    assert_error(by_argument, "weights.load_mode", *says)
    prefetched = pd_data(weights={"load_mode": "cpu_prefetch"}, engine={"quantization": "fp8"})
    assert plan_of(prefetched).errors == ()


@pytest.mark.parametrize(
    ("transport", "lacks", "says"), [("nixl", "nixl_version", "nixl"), ("store", "mooncake_version", "mooncake")]
)
def test_a_transport_needs_its_library(transport: str, lacks: str, says: str) -> None:
    facts = facts_of(abilities=replace(CPU, **{lacks: None}))
    assert_error(pd_data(weights={"transport": transport}), "weights.transport", says, "path", facts=facts)
    assert "weights.transport" not in {found.field for found in plan_of(pd_data(**WEIGHTS), facts).errors}


def test_a_vllm_that_cannot_replace_weights() -> None:
    facts = facts_of(abilities=replace(CPU, weight_transfer=False))
    assert_error(pd_data(**WEIGHTS), "weights", CPU.python, "install vLLM", facts=facts)
    assert plan_of(pd_data(), facts).errors == ()


def test_the_variable_of_its_settings_is_the_plans() -> None:
    assert_error(pd_data(env={"HEADRACE_WEIGHTS": "{}"}), "env.HEADRACE_WEIGHTS", "set [weights]")


def test_rolling_needs_a_second_replica_of_each_role() -> None:
    def told(**roles: Any) -> list[str]:
        plan = plan_of(pd_data(roles=roles, weights={"strategy": "rolling"}), gpu_facts())
        return [found.problem for found in plan.findings if found.field == "weights.strategy"]

    (problem,) = told(decode={"replicas": 2})
    assert "prefill has one replica" in problem
    assert told(prefill={"replicas": 2}, decode={"replicas": 2}) == []


def with_stock_store(**changes: Any) -> JsonDict:
    """The decode role has a store connector of the job file's own."""
    store = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    return pd_data(roles={"decode": {"engine": {"kv_transfer_config": store}}}, **changes)


def test_a24_a_pool_whose_keys_carry_no_epoch_is_wiped_by_each_update() -> None:
    plan = plan_of(with_stock_store(**WEIGHTS))
    field = "roles.decode.engine.kv_transfer_config"
    assert (plan.errors, plan.wipes_pool) == ((), True)
    assert any("each update wipes the pool" in found.problem for found in plan.findings if found.field == field)
    assert not plan_of(pd_data(**WEIGHTS)).wipes_pool


def test_a20_a_pool_that_is_wiped_is_neither_in_use_nor_shared_meanwhile() -> None:
    rolling = with_stock_store(weights={"strategy": "rolling"})
    assert_error(rolling, "weights.strategy", "kv_transfer_config", "barrier")
    joined = {"pool": {"master": "10.0.0.9:50051"}}
    assert_error(with_stock_store(**joined, **WEIGHTS), "pool.master", "wipes all", "drop pool.master")
    assert plan_of(pd_data(**joined, **WEIGHTS)).errors == ()
