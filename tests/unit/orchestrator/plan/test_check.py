"""What must not be started: each rule with the field, the values and the mend. Field cases are in the names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connectors.types import JsonDict
from orchestrator.errors import PlanRefused
from orchestrator.plan.build import refuse_errors
from orchestrator.plan.facts import ClusterFacts
from tests.unit.orchestrator.samples import (
    CPU,
    GIB,
    GPU,
    GPU_OLD,
    MOONCAKE,
    colocated_data,
    error_at,
    facts_of,
    gpu_facts,
    node,
    pd_data,
    plan_of,
    transfer,
    unit,
    warning_at,
)

DISK: JsonDict = {"disk": {"path": "/nvme/kv"}}
TWO_NODES = (node(0, gpus=4, gib=512), node(1, gpus=4, gib=512))


def roles(**decode: Any) -> JsonDict:
    return {"roles": {"decode": decode}}


def assert_error(data: JsonDict, field: str, *says: str, facts: ClusterFacts | None = None) -> None:
    """One error about `field`, in whose text and mend each of `says` stands; and the plan is refused."""
    plan = plan_of(data, facts)
    found = error_at(plan, field)
    for word in says:
        assert word in f"{found.problem}; {found.mend}"
    assert found.mend
    with pytest.raises(PlanRefused, match="cannot run"):
        refuse_errors(plan)


@pytest.mark.parametrize("data", [pd_data(), colocated_data(), pd_data(kv_offload="none", **roles(kv_offload="none"))])
def test_a_good_job_has_no_findings(data: JsonDict) -> None:
    plan = plan_of(data)
    assert plan.findings == ()
    refuse_errors(plan)


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("tensor_parallel_size", 2, None),
        ("tensor_parallel_size", 2, 4),
        ("pipeline_parallel_size", 2, None),
        ("prefill_context_parallel_size", 2, None),
        ("decode_context_parallel_size", None, 2),
        ("block_size", 64, 32),
        ("block_size", None, 64),
        ("kv_cache_dtype", "fp8", None),
        ("dtype", "float32", "bfloat16"),
        ("prefix_caching_hash_algo", "sha256", "xxhash"),
    ],
)
def test_a19_roles_that_share_a_pool_disagree_on_kv_layout(name: str, prefill: object, decode: object) -> None:
    both = {"prefill": prefill, "decode": decode}
    data = pd_data(roles={role: {"engine": {name: value}} for role, value in both.items() if value is not None})
    owner = "decode" if decode is not None else "prefill"
    defaults = {"block_size": "vLLM's default", "kv_cache_dtype": "'auto'"}
    values = [repr(value) if value is not None else defaults.get(name, "1") for value in both.values()]
    assert_error(
        data,
        f"roles.{owner}.engine.{name}",
        f"decode has {values[1]}, prefill has {values[0]}",
        f"give both roles one {name}",
        facts=gpu_facts(),
    )


def test_a19_a_default_written_out_is_no_disagreement() -> None:
    engine = {"tensor_parallel_size": 1, "kv_cache_dtype": "auto", "dtype": "auto", "prefix_caching_hash_algo": "sha256"}
    assert plan_of(pd_data(**roles(engine=engine))).errors == ()


def test_a19_without_a_pool_only_what_a_handoff_needs_must_agree() -> None:
    none = {"kv_offload": "none"}
    unequal = pd_data(roles={"prefill": none, "decode": {**none, "engine": {"tensor_parallel_size": 2}}})
    assert plan_of(unequal, gpu_facts()).errors == ()
    unlike = pd_data(roles={"prefill": none, "decode": {**none, "engine": {"kv_cache_dtype": "fp8"}}})
    assert_error(
        unlike, "roles.decode.engine.kv_cache_dtype", "decode has 'fp8', prefill has 'auto'", facts=gpu_facts()
    )


def test_a19_both_roles_lay_out_kv_alike() -> None:
    field = "VLLM_KV_CACHE_LAYOUT"
    assert_error(
        pd_data(**roles(env={field: "BLHNC"})), f"roles.decode.env.{field}", "'BLHNC'", "prefill has vLLM's default"
    )
    assert plan_of(pd_data(env={field: "LBHNC"})).errors == ()


def test_a23_another_hash_seed_is_refused() -> None:
    assert_error(
        pd_data(**roles(env={"PYTHONHASHSEED": "7"})), "roles.decode.env.PYTHONHASHSEED", "is '7'", "gets '0'", "drop it"
    )
    assert plan_of(pd_data(env={"PYTHONHASHSEED": "0"})).errors == ()


def test_prefix_caching_stays_on() -> None:
    data = pd_data(engine={"enable_prefix_caching": False})
    assert_error(data, "engine.enable_prefix_caching", "is false", "leave prefix caching on")
    assert_error(
        pd_data(engine={"no_enable_prefix_caching": True}),
        "engine.no_enable_prefix_caching",
        "write enable_prefix_caching = false",
    )


def test_cpu_block_size() -> None:
    assert_error(pd_data(engine={"block_size": 16}), "engine.block_size", "is 16", "multiple of 32")
    assert plan_of(pd_data(engine={"block_size": 16}), gpu_facts()).errors == ()


def test_two_disk_paths_are_refused() -> None:
    data = pd_data(kv_offload={**MOONCAKE, **DISK}, **roles(kv_offload={"disk": {"path": "/ssd"}}))
    field = "roles.decode.kv_offload.disk.path"
    assert_error(data, field, "decode has /ssd, prefill has /nvme/kv", "give both roles the same")


def test_all_lenders_have_the_disk_or_none() -> None:
    data = pd_data(roles={"prefill": {"kv_offload": DISK}, "decode": {"kv_offload": {"cpu": {"num_bytes": 1}}}})
    assert_error(
        data, "roles.decode.kv_offload.disk", "decode lends capacity without a disk, prefill has /nvme/kv", "same disk path"
    )


def test_a_disk_on_a_role_that_lends_nothing() -> None:
    inherited = pd_data(kv_offload={**MOONCAKE, **DISK})
    assert plan_of(inherited).findings == ()
    named = pd_data(kv_offload={**MOONCAKE, **DISK}, **roles(kv_offload=DISK))
    assert "has no effect" in warning_at(plan_of(named), "roles.decode.kv_offload.disk").problem


def test_two_storage_clients_do_not_share_a_folder() -> None:
    data = pd_data(kv_offload={**MOONCAKE, **DISK}, **roles(kv_offload={"cpu": {"num_bytes": 1}}))
    problem = "prefill and decode both lend on n0, with /nvme/kv"
    assert_error(data, "kv_offload.disk.path", problem, "roles.decode.kv_offload.cpu.num_bytes = 0")
    assert plan_of(data, facts_of(node(0), node(1))).errors == ()


def test_two_leases_are_refused() -> None:
    data = pd_data(pool={"lease_ttl": "1m"}, **roles(kv_offload={"lease_ttl": "30s"}))
    assert_error(data, "roles.decode.kv_offload.lease_ttl", "is 30 s, pool.lease_ttl is 60 s", "give one value")
    two = pd_data(kv_offload={**MOONCAKE, "lease_ttl": 20}, **roles(kv_offload={"lease_ttl": 30}))
    assert_error(two, "roles.decode.kv_offload.lease_ttl", "is 30 s, kv_offload.lease_ttl is 20 s")


def test_a22_a_lease_below_a_second_is_refused() -> None:
    assert_error(pd_data(pool={"lease_ttl": "500ms"}), "pool.lease_ttl", "is 500 ms", "use 1s or more")
    assert "cannot be evicted" in warning_at(plan_of(pd_data(pool={"lease_ttl": "1h"})), "pool.lease_ttl").problem


def test_a22_the_lease_reaches_the_master_in_milliseconds() -> None:
    master = unit(plan_of(pd_data(pool={"lease_ttl": "1.5s"})), "mooncake-master")
    assert "--default_kv_lease_ttl=1500" in master.argv


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


def test_a29_a_port_of_another_job_is_refused() -> None:
    facts = facts_of(reserved_ports=frozenset({8000}))
    assert_error(pd_data(), "router.port", "8000 is planned by another job", "choose another", facts=facts)


@pytest.mark.parametrize("flag", ["root_fs_dir", "root-fs-dir", "enable_ha"])
def test_flags_that_a_disk_tier_forbids(flag: str) -> None:
    flags = {"master_flags": {flag: "x"}}
    data = pd_data(kv_offload={**MOONCAKE, **DISK}, pool=flags)
    assert_error(data, f"pool.master_flags.{flag}", "set together with kv_offload.disk", "drop one")
    assert plan_of(pd_data(pool=flags)).errors == ()


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


def test_a_pool_that_nobody_lends_to() -> None:
    data = pd_data(kv_offload={**MOONCAKE, "cpu": {"num_bytes": 0}})
    assert_error(data, "kv_offload.cpu.num_bytes", "is 0 on every role (prefill, decode)")
    assert plan_of({**data, "trainer_storage": {"num_bytes": GIB}}).errors == ()
    assert plan_of({**data, "pool": {"master": "10.0.0.9:50051"}}).errors == ()


def test_trainer_storage() -> None:
    lends = {"trainer_storage": {"num_bytes": "1GiB"}}
    no_pool = pd_data(kv_offload="none", **lends, **roles(kv_offload="none"))
    assert_error(no_pool, "trainer_storage", "no role joins", 'kv_offload.type = "mooncake"')
    lends["trainer_storage"]["nodes"] = ["n9"]
    assert_error(pd_data(**lends), "trainer_storage.nodes", "'n9' is no node of this job", "n0")
    lends["trainer_storage"]["nodes"] = ["n0", "n0"]
    assert_error(pd_data(**lends), "trainer_storage.nodes", "'n0' is named 2 times")


def test_a20_a_joined_master_and_weights_in_place_are_refused() -> None:
    master = {"pool": {"master": "10.0.0.9:50051"}}
    assert plan_of(pd_data(**master)).findings == ()
    assert_error(pd_data(**master, weights={}), "pool.master", "joins 10.0.0.9:50051", "drop pool.master")
    ignored = plan_of(pd_data(pool={"master": "10.0.0.9:50051", "lease_ttl": 5}))
    assert "no effect on the running master 10.0.0.9:50051" in warning_at(ignored, "pool.lease_ttl").problem


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.0.1", "localhost", "0.0.0.0", "::1"])
def test_a30_a_loopback_node_in_a_job_of_two_nodes_is_refused(address: str) -> None:
    facts = facts_of(node(0, address=address), node(1))
    assert_error(pd_data(), "nodes", f"n0 is known as {address}", "addresses that the other nodes reach", facts=facts)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"env": {"VLLM_HOST_IP": "127.0.0.1"}}, "env.VLLM_HOST_IP"),
        (roles(env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"}), "roles.decode.env.VLLM_NIXL_SIDE_CHANNEL_HOST"),
        ({"env": {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "0.0.0.0"}}, "env.MOONCAKE_REQUESTER_LOCAL_HOSTNAME"),
        ({"engine": {"data_parallel_address": "127.0.0.1"}}, "engine.data_parallel_address"),
        ({"pool": {"master": "localhost:50051"}}, "pool.master"),
        ({"router": {"host": "127.0.0.1"}}, "router.host"),
    ],
)
def test_a30_a_loopback_address_is_not_told_to_another_node(changes: dict[str, Any], field: str) -> None:
    assert_error(pd_data(**changes), field, "in a job of 2 nodes", facts=facts_of(node(0), node(1)))
    assert plan_of(pd_data(**changes)).errors == ()


def test_a30_a_bind_address_may_be_every_interface() -> None:
    plan = plan_of(pd_data(router={"host": "0.0.0.0"}), facts_of(node(0), node(1)))
    assert plan.errors == ()
    assert plan.router.url == "http://10.0.0.1:8000"


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


def test_no_prometheus_is_a_warning_unless_monitoring_is_off() -> None:
    facts = facts_of(prometheus=None)
    data = pd_data(monitoring={"enabled": True})
    assert "nothing scrapes" in warning_at(plan_of(data, facts), "monitoring.enabled").problem
    assert plan_of(pd_data(), facts).findings == ()


def test_errors_come_first() -> None:
    plan = plan_of(pd_data(weights={}, pool={"lease_ttl": "1h"}, engine={"port": 1}))
    assert [finding.severity for finding in plan.findings] == ["error", "warning", "warning"]


def test_a_mistake_of_the_job_is_told_once_for_all_roles() -> None:
    assert len(plan_of(pd_data(engine={"port": 1})).errors) == 1


class TestNodeMemory:
    field = "kv_offload.cpu.num_bytes"

    def test_segments_buffers_and_weights_are_summed(self) -> None:
        data = pd_data(
            kv_offload={**MOONCAKE, "cpu": {"num_bytes": "1GiB"}},
            engine={"kv_cache_memory_bytes": GIB},
            pool={"local_buffer_bytes": "1GiB"},
        )
        needed = 1 + 2 * (1 + 1 + 0.5)  # segment; buffer, KV cache and weights of two engines
        assert plan_of(data, facts_of(node(gib=needed, address="127.0.0.1"))).errors == ()
        facts = facts_of(node(gib=needed - 0.25, address="127.0.0.1"))
        says = ("n0 has 5.75 GiB, its processes need 6.00 GiB", "segment of storage-prefill-0 1.00 GiB", "lend less")
        assert_error(data, self.field, *says, facts=facts)

    def test_a_disk_tier_needs_staging(self) -> None:
        data = pd_data(kv_offload={**MOONCAKE, **DISK}, pool={"local_buffer_bytes": 1})
        facts = facts_of(node(gib=2, address="127.0.0.1"), weight_bytes=0)
        assert plan_of(data, facts).errors == ()
        tight = facts_of(node(gib=1.4, address="127.0.0.1"), weight_bytes=0)
        assert_error(data, self.field, "staging of storage-prefill-0 1.25 GiB", facts=tight)

    def test_a_native_tier_counts_per_engine(self) -> None:
        data = colocated_data(
            kv_offload={"type": "native", "cpu": {"num_bytes": "10GiB"}}, roles={"colocated": {"replicas": 3}}
        )
        one = node(gpus=4, gib=25, address="127.0.0.1")
        assert_error(data, self.field, "need 30.00 GiB", "native tier of colocated-0", facts=gpu_facts(one))

    def test_prefetched_weights_count_on_gpus_too(self) -> None:
        data = pd_data(weights={"load_mode": "cpu_prefetch"})
        facts = gpu_facts(node(gpus=2, gib=64, address="127.0.0.1"), weight_bytes=40 * GIB)
        assert_error(data, self.field, "prefetched weights of prefill-0 40.00 GiB", facts=facts)

    def test_two_nodes_are_counted_apart(self) -> None:
        data = pd_data(kv_offload={**MOONCAKE, "cpu": {"num_bytes": "20GiB"}})
        assert plan_of(data, facts_of(node(0), node(1))).errors == ()
        assert_error(data, self.field, "n0 has 8.00 GiB", facts=facts_of(node(0, gib=8), node(1)))
