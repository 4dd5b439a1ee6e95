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
        ({"engine": {"data_parallel_rpc_port": 1}}, "engine.data_parallel_rpc_port"),
        ({"engine": {"master_port": 1}}, "engine.master_port"),
        ({"engine": {"nnodes": 2}}, "engine.nnodes"),
        ({"engine": {"ssl_keyfile": "/k"}}, "engine.ssl_keyfile"),
        ({"engine": {"api_server_count": 2}}, "engine.api_server_count"),
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
    assert found.problem.startswith("replaces the composed chain of decode by NixlConnector; ")
    assert found.problem.endswith("decode then has no part in the pool")
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
        (replace(CPU, middleware_flag=False), "has no --middleware"),
        (replace(CPU, plugin_path=None), "has no connectors.vllm_plugin of this version"),
        (None, "has no vllm installed"),
    ],
)
def test_what_is_not_installed_is_refused_and_still_planned(abilities: Any, says: str) -> None:
    assert_error(pd_data(), "launch.python", says, facts=facts_of(abilities=abilities))


def test_a_model_that_is_not_there() -> None:
    assert_error(pd_data(), "model.path", "there is no folder /models/small", facts=facts_of(is_folder=False))
    assert plan_of(pd_data(model={"path": "org/model"}), facts_of(is_folder=False)).errors == ()
    relative = pd_data(model={"path": ".cache/model"})
    says = ("there is no folder .cache/model", "seen from where headrace was started")
    assert_error(relative, "model.path", *says, facts=facts_of(is_folder=False))


def test_an_engine_whose_handoff_lease_is_not_ours_to_set() -> None:
    facts = gpu_facts(abilities=replace(GPU, handoff_lease=False))
    plan = plan_of(pd_data(), facts)
    assert plan.findings == ()
    assert "kv_lease_duration" not in str(transfer(plan, "prefill-0"))
    says = ("is 20 s, and vLLM 0.32.0", "for 30 s whatever it is told", 'set it to "30s"')
    assert_error(pd_data(handoff={"lease": "20s"}), "handoff.lease", *says, facts=facts)


def nixl(**extra: int | str) -> JsonDict:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize(
    ("config", "lease", "says"),
    [
        (nixl(kv_lease_duration=60), "30s", ("has kv_lease_duration 60", "which is 30 s", 'handoff.lease = "60s"')),
        (nixl(), "20s", ("vLLM's default of 30 s", "which is 20 s", 'handoff.lease = "30s"', "kv_lease_duration = 20")),
        (nixl(kv_lease_duration="60"), "20s", ("has kv_lease_duration '60'", "kv_lease_duration = 20")),
    ],
)
def test_a39_a_transfer_config_of_the_users_and_the_router_go_by_one_lease(
    config: JsonDict, lease: str, says: tuple[str, ...]
) -> None:
    data = pd_data(handoff={"lease": lease}, roles={"prefill": {"engine": {"kv_transfer_config": config}}})
    assert_error(data, "roles.prefill.engine.kv_transfer_config", *says)


@pytest.mark.parametrize(("config", "lease"), [(nixl(kv_lease_duration=20), "20.5s"), (nixl(), "30s")])
def test_a39_equal_leases_are_no_error(config: JsonDict, lease: str) -> None:
    data = pd_data(handoff={"lease": lease}, roles={"prefill": {"engine": {"kv_transfer_config": config}}})
    assert not any("lease" in error.problem for error in plan_of(data).errors)


def test_a21_who_joins_the_pool_is_what_the_transfer_config_says() -> None:
    store = {"kv_connector": "MooncakeStoreConnector", "kv_load_failure_policy": "recompute"}
    plan = plan_of(pd_data(kv_offload={"cpu": {"num_bytes": 1}}, **roles(engine={"kv_transfer_config": nixl()})))
    assert [engine.joins_pool for engine in plan.engines] == [True, False]
    assert "MOONCAKE_CONFIG_PATH" not in unit(plan, "decode-0").env
    joined = plan_of(pd_data(**roles(engine={"kv_transfer_config": store})))
    assert [engine.joins_pool for engine in joined.engines] == [True, True]
    assert "no part in a handoff" in warning_at(joined, "roles.decode.engine.kv_transfer_config").problem
    stray = pd_data(**roles(kv_offload="none", engine={"kv_transfer_config": store}))
    field = "roles.decode.engine.kv_transfer_config"
    assert_error(stray, field, "kv_offload of decode names none", 'kv_offload.type = "mooncake"')


def test_a42_the_token_route_is_not_switched_off() -> None:
    assert_error(pd_data(engine={"enable_scale_out": False}), "engine.enable_scale_out", "--enable-scale-out", "403")


def test_a19_the_beginning_of_a_name_does_not_pass_by_its_rules() -> None:
    data = pd_data(**roles(engine={"tensor_parallel": 2}))
    field = "roles.decode.engine.tensor_parallel"
    assert_error(data, field, "is a beginning of tensor_parallel_size", "write the whole name")
