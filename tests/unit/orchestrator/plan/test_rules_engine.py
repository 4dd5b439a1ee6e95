"""What is installed, what it can do, and what of it the plan decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connectors.types import JsonDict
from tests.unit.orchestrator.samples import (
    CPU,
    GPU,
    GPU_OLD,
    assert_error,
    colocated_data,
    facts_of,
    gpu_facts,
    pd_data,
    plan_of,
    transfer,
    unit,
    warning_at,
)


def roles(**decode: Any) -> JsonDict:
    return {"roles": {"decode": decode}}


def test_a22_the_load_failure_policy_is_always_stated() -> None:
    for data in (pd_data(), colocated_data(), pd_data(kv_offload="none", **roles(kv_offload="none"))):
        for engine in plan_of(data).engines:
            config = transfer(plan_of(data), engine.name)
            assert config is not None
            assert config["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": {"port": 1}}, "engine.port"),
        ({"engine": {"host": "0.0.0.0"}}, "engine.host"),
        ({"engine": {"model": "x"}}, "engine.model"),
        ({"engine": {"served-model-name": "x"}}, "engine.served-model-name"),
        ({"engine": {"kv_offloading_size": 1}}, "engine.kv_offloading_size"),
        ({"engine": {"max-num-seqs": 1}}, "engine.max-num-seqs"),
        (roles(engine={"api_key": "x"}), "roles.decode.engine.api_key"),
        ({"env": {"VLLM_RPC_BASE_PATH": "/x"}}, "env.VLLM_RPC_BASE_PATH"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "3"}}, "env.CUDA_VISIBLE_DEVICES"),
        (roles(env={"VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}), "roles.decode.env.VLLM_NIXL_SIDE_CHANNEL_PORT"),
        (roles(env={"MC_MIN_RPC_PORT": "1"}), "roles.decode.env.MC_MIN_RPC_PORT"),
        ({"pool": {"master_flags": {"rpc_port": 1}}}, "pool.master_flags.rpc_port"),
        ({"pool": {"master_flags": {"metrics-port": 1}}}, "pool.master_flags.metrics-port"),
        ({"pool": {"master_flags": {"default_kv_lease_ttl": 1}}}, "pool.master_flags.default_kv_lease_ttl"),
    ],
)
def test_a29_what_the_plan_decides_is_not_set_twice(changes: dict[str, Any], field: str) -> None:
    assert_error(pd_data(**changes), field)


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({}, "roles", "no role is given"),
        ({"prefill": {}}, "roles.decode", "add [roles.decode]"),
        ({"decode": {}}, "roles.prefill", "add [roles.prefill]"),
        ({"prefill": {}, "decode": {}, "colocated": {}}, "roles", "colocated and decode and prefill are mixed"),
        ({"prefill": {}, "colocated": {}}, "roles", "colocated and prefill are mixed"),
    ],
)
def test_roles_that_make_no_fleet(given: JsonDict, field: str, says: str) -> None:
    assert_error({**pd_data(), "roles": given}, field, says)


def test_an_explicit_transfer_config_wins_with_a_warning() -> None:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    plan = plan_of(pd_data(**roles(engine={"kv_transfer_config": config})))
    assert transfer(plan, "decode-0") == config
    found = warning_at(plan, "roles.decode.engine.kv_transfer_config")
    assert found.problem == "replaces the composed chain of decode by NixlConnector"
    assert plan.errors == ()


def test_a22_an_explicit_transfer_config_without_a_policy_is_warned_about() -> None:
    plan = plan_of(pd_data(**roles(engine={"kv_transfer_config": {}})))
    warnings = [finding.problem for finding in plan.findings]
    assert len(warnings) == 2
    assert "by no connector" in warnings[0]
    assert "vLLM's default fails a request" in warnings[1]
    assert transfer(plan, "decode-0") == {}


def test_an_engine_without_decode_saving_is_refused_by_name() -> None:
    facts = gpu_facts(abilities=GPU_OLD)
    says = ("is true", "vLLM 0.25.1 (/venv/bin/python)", "install vLLM 0.32")
    assert_error(pd_data(), "kv_offload.save_decode_cache", *says, facts=facts)
    assert_error(
        pd_data(**roles(kv_offload={"save_decode_cache": True})),
        "roles.decode.kv_offload.save_decode_cache",
        *says,
        facts=facts,
    )
    off = plan_of(pd_data(**roles(kv_offload={"save_decode_cache": False})), facts)
    assert off.errors == ()
    assert "save_decode_cache" not in str(transfer(off, "prefill-0"))


def test_a42_an_engine_without_the_switch_of_the_token_route() -> None:
    plan = plan_of(colocated_data(kv_offload="none"), gpu_facts(abilities=GPU_OLD))
    found = warning_at(plan, "launch.python")
    assert "no --enable-scale-out" in found.problem
    assert "--enable-scale-out" not in unit(plan, "colocated-0").argv


def test_a42_the_token_route_is_switched_on() -> None:
    plan = plan_of(pd_data())
    assert all("--enable-scale-out" in unit(plan, engine.name).argv for engine in plan.engines)


@pytest.mark.parametrize(
    ("abilities", "says"),
    [
        (replace(CPU, mooncake_master=None), "has no mooncake_master"),
        (replace(CPU, mooncake_client=None), "has no mooncake_client"),
        (replace(CPU, nixl_version=None), "has no NIXL"),
        (None, "has no vllm installed"),
    ],
)
def test_what_is_not_installed_is_refused_and_still_planned(abilities: Any, says: str) -> None:
    assert_error(pd_data(), "launch.python", says, facts=facts_of(abilities=abilities))


def test_a_model_that_is_not_there() -> None:
    assert_error(pd_data(), "model.path", "there is no folder /models/small", facts=facts_of(is_folder=False))
    assert plan_of(pd_data(model={"path": "org/model"}), facts_of(is_folder=False)).errors == ()
    relative = pd_data(model={"path": ".cache/model"})
    assert_error(relative, "model.path", "there is no folder .cache/model", facts=facts_of(is_folder=False))


def test_an_engine_whose_handoff_lease_is_not_ours_to_set() -> None:
    plan = plan_of(pd_data(), gpu_facts(abilities=replace(GPU, handoff_lease=False)))
    assert "is 30 s, and vLLM 0.32.0" in warning_at(plan, "handoff.lease").problem
    assert "kv_lease_duration" not in str(transfer(plan, "prefill-0"))


def test_weights_are_checked_and_not_driven_yet() -> None:
    assert "not driven by this version" in warning_at(plan_of(pd_data(weights={})), "weights").problem
