"""Engines as processes: chains, environment, files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from connectors.engine_argv import FENCE
from connectors.types import JsonDict
from connectors.vllm_plugin.weights.settings import SETTINGS_VARIABLE, WORKER_EXTENSION, WeightSettings, read_settings
from deploy.local.request import child_environment
from deploy.unit import HttpProbe, RunContext
from orchestrator.errors import PlanRefused
from tests.unit.orchestrator.samples import (
    CPU,
    argument,
    assert_error,
    colocated_data,
    connector_names,
    facts_of,
    file_text,
    node,
    pd_data,
    plan_of,
    transfer,
    unit,
)


class TestEngineEnvironment:
    def test_a23_every_engine_has_the_same_hash_seed(self) -> None:
        plan = plan_of(pd_data(roles={"prefill": {"replicas": 2}, "decode": {"replicas": 2}}))
        assert {unit(plan, engine.name).env["PYTHONHASHSEED"] for engine in plan.engines} == {"0"}

    def test_every_engine_has_lookup_sockets_and_a_side_channel_of_its_own(self) -> None:
        plan = plan_of(pd_data(roles={"prefill": {"replicas": 2}, "decode": {"replicas": 2}}))
        for variable in ("VLLM_RPC_BASE_PATH", "VLLM_NIXL_SIDE_CHANNEL_PORT", "MC_STORE_CLIENT_MIN_PORT"):
            assert len({unit(plan, engine.name).env[variable] for engine in plan.engines}) == 4
        folders = {str(file.path.parent) for file in plan.files}
        assert {unit(plan, engine.name).env["VLLM_RPC_BASE_PATH"] for engine in plan.engines} <= folders

    def test_the_users_environment_is_stronger(self) -> None:
        plan = plan_of(pd_data(env={"UCX_TLS": "tcp"}, roles={"decode": {"env": {"UCX_TLS": "all"}}}))
        assert [unit(plan, name).env["UCX_TLS"] for name in ("prefill-0", "decode-0")] == ["tcp", "all"]

    def test_what_the_launching_shell_says_of_engines_is_taken_out(self) -> None:
        engine = unit(plan_of(pd_data(env={"UCX_TLS": "tcp", "RANK": "3"})), "decode-0")
        assert {"UCX_*", "MC_*", "MOONCAKE_*", "RANK", "MASTER_PORT", "VLLM_PORT"} <= set(engine.unset_env)
        base = {"UCX_NET_DEVICES": "eth7", "UCX_TLS": "x", "RANK": "1", "VLLM_PORT": "1", "PATH": "/bin"}
        run = RunContext(job="demo", run_id="r", log_dir=Path("/logs"))
        env = child_environment(base | {"MC_X": "1"}, run, engine)
        assert (env["UCX_NET_DEVICES"], env["UCX_TLS"], env["RANK"], env["PATH"]) == ("lo", "tcp", "3", "/bin")
        assert {"VLLM_PORT", "MC_X"}.isdisjoint(env)

    def test_modules_of_the_folder_where_it_starts_are_not_run(self) -> None:
        plan = plan_of(pd_data(monitoring={"enabled": True}))
        assert {planned.cwd for planned in plan.units} == {Path("/jobs/demo")}
        for name in ("prefill-0", "decode-0", "router"):
            assert unit(plan, name).argv[1:3] == ("-P", "-m")

    def test_a_colocated_engine_has_no_handoff(self) -> None:
        plan = plan_of(colocated_data())
        env = unit(plan, "colocated-0").env
        assert not any(name.startswith(("VLLM_NIXL", "UCX")) for name in env)
        assert "UCX" not in {choice.subject for choice in plan.choices}


class TestFence:
    def test_every_engine_loads_its_fence_and_finds_the_token(self) -> None:
        plan = plan_of(pd_data())
        for engine in plan.engines:
            planned = unit(plan, engine.name)
            assert argument(plan, engine.name, "--middleware") == FENCE
            assert planned.env["HEADRACE_TOKEN_FILE"] == engine.token_file == plan.router.token_file
            assert isinstance(planned.probe, HttpProbe)
            assert str(planned.probe.token_file) == engine.token_file

    def test_the_users_middleware_stays_inside_the_fence(self) -> None:
        plan = plan_of(pd_data(engine={"middleware": "a.B"}, roles={"decode": {"engine": {"middleware": ["c.D"]}}}))
        for engine, own in (("prefill-0", "a.B"), ("decode-0", "c.D")):
            argv = unit(plan, engine).argv
            loaded = [value for flag, value in pairwise(argv) if flag == "--middleware"]
            assert loaded == [own, FENCE]

    def test_a_middleware_that_is_none_is_refused(self) -> None:
        with pytest.raises(PlanRefused, match=r"roles\.decode\.engine\.middleware: is neither a string nor a list"):
            plan_of(pd_data(roles={"decode": {"engine": {"middleware": 3}}}))

    def test_an_interpreter_that_finds_the_plugin_needs_no_path(self) -> None:
        assert "PYTHONPATH" not in unit(plan_of(pd_data()), "decode-0").env

    @pytest.mark.parametrize(("env", "path"), [({}, "/headrace"), ({"PYTHONPATH": "/mine"}, "/headrace:/mine")])
    def test_another_interpreter_is_told_where_the_plugin_is(self, env: dict[str, str], path: str) -> None:
        facts = facts_of(abilities=replace(CPU, plugin_path="/headrace"))
        assert unit(plan_of(pd_data(env=env), facts), "decode-0").env["PYTHONPATH"] == path

    @pytest.mark.parametrize("name", ["HEADRACE_TOKEN_FILE", "HEADRACE_INSTANCE", "VLLM_API_KEY"])
    def test_what_the_fence_goes_by_cannot_be_set(self, name: str) -> None:
        assert_error(pd_data(env={name: "x"}), f"env.{name}", "drop it")

    def test_a_shell_does_not_name_instances_or_keys(self) -> None:
        assert {"HEADRACE_INSTANCE", "VLLM_API_KEY"} <= set(unit(plan_of(pd_data()), "decode-0").unset_env)


class TestWeights:
    """How engines that take new weights in place are started."""

    def test_every_engine_of_a_job_with_weights_loads_the_plugin(self) -> None:
        weights = {"transport": "nixl", "load_mode": "cpu_prefetch", "keep_copy": False}
        plan = plan_of(pd_data(weights=weights), facts_of(node(address="10.0.0.7")))
        for engine in plan.engines:
            assert argument(plan, engine.name, "--worker-extension-cls") == WORKER_EXTENSION
            assert argument(plan, engine.name, "--weight-transfer-config") == '{"backend": "headrace"}'
            env = unit(plan, engine.name).env
            sources = ({"transport": "nixl"},)
            wanted = WeightSettings(mode="cpu_prefetch", keep_copy=False, host="10.0.0.7", sources=sources)
            assert read_settings(env) == wanted
            assert env["VLLM_SERVER_DEV_MODE"] == "1"

    def test_a_job_without_them_loads_nothing_of_it(self) -> None:
        plan = plan_of(pd_data())
        for engine in plan.engines:
            assert argument(plan, engine.name, "--worker-extension-cls") is None
            assert argument(plan, engine.name, "--weight-transfer-config") is None
            assert SETTINGS_VARIABLE not in unit(plan, engine.name).env

    def test_colocated_engines_read_weights_by_ucx_too(self) -> None:
        plan = plan_of(colocated_data(weights={}))
        assert unit(plan, "colocated-0").env["UCX_NET_DEVICES"] == "lo"
        assert "UCX" in {choice.subject for choice in plan.choices}


class TestChains:
    def test_a21_both_roles_list_handoff_then_store(self) -> None:
        plan = plan_of(pd_data())
        for engine in ("prefill-0", "decode-0"):
            config = transfer(plan, engine)
            assert config is not None
            assert config["kv_connector"] == "MultiConnector"
            assert config["kv_load_failure_policy"] == "recompute"
            assert connector_names(config) == ["NixlConnector", "MooncakeStoreConnector"]
            assert config["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"][
                "save_decode_cache"
            ]

    @pytest.mark.parametrize(
        ("data", "engine", "names"),
        [
            (colocated_data(), "colocated-0", ["MooncakeStoreConnector"]),
            (colocated_data(kv_offload="none"), "colocated-0", []),
            (pd_data(roles={"decode": {"kv_offload": "none"}}), "decode-0", ["NixlConnector"]),
            (
                pd_data(roles={"decode": {"kv_offload": {"type": "native", "cpu": {"num_bytes": 1}}}}),
                "decode-0",
                ["NixlConnector", "OffloadingConnector"],
            ),
        ],
    )
    def test_other_chains(self, data: JsonDict, engine: str, names: list[str]) -> None:
        assert connector_names(transfer(plan_of(data), engine)) == names

    def test_decode_saving_can_be_switched_off(self) -> None:
        plan = plan_of(pd_data(kv_offload={"save_decode_cache": False}))
        assert "save_decode_cache" not in str([transfer(plan, engine.name) for engine in plan.engines])

    def test_engines_and_router_go_by_one_lease(self) -> None:
        plan = plan_of(pd_data(handoff={"lease": "20.9s"}))
        config = transfer(plan, "prefill-0")
        assert config is not None
        nixl = config["kv_connector_extra_config"]["connectors"][0]
        assert nixl["kv_connector_extra_config"]["kv_lease_duration"] == 20
        assert json.loads(file_text(plan, "router.json"))["handoff_lease_s"] == 20

    def test_one_config_file_per_role_holds_what_its_engines_get(self) -> None:
        plan = plan_of(pd_data(roles={"prefill": {"replicas": 2}, "decode": {"engine": {"max_num_seqs": 512}}}))
        names = [file.path.name for file in plan.files if file.path.name.startswith("inference")]
        assert names == ["inference-prefill.json", "inference-decode.json"]
        written = json.loads(file_text(plan, "inference-decode.json"))
        assert written["role"] == "decode"
        assert written["arguments"]["kv_transfer_config"] == transfer(plan, "decode-0")
        assert argument(plan, "decode-0", "--max-num-seqs") == "512"
        assert argument(plan, "prefill-1", "--max-num-seqs") is None
