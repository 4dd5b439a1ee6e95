"""The whole plan: pure, complete, and every process told the right things."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from connectors.types import JsonDict
from deploy.unit import HttpProbe, ListenProbe, MetricProbe
from orchestrator.errors import PlanRefused
from orchestrator.plan.types import JobPlan, plan_from_json, plan_to_json
from tests.unit.orchestrator.samples import (
    CPU,
    GIB,
    GPU_OLD,
    MOONCAKE,
    argument,
    colocated_data,
    connector_names,
    facts_of,
    file_text,
    gpu_facts,
    node,
    pd_data,
    plan_of,
    transfer,
    unit,
)

TWO_NODES = (node(0, gpus=4, gib=512), node(1, gpus=4, gib=512))


def shuffled(value: Any, seed: int) -> Any:
    if not isinstance(value, dict):
        return value
    items = [(key, shuffled(inner, seed)) for key, inner in value.items()]
    random.Random(seed).shuffle(items)
    return dict(items)


def rich_data() -> JsonDict:
    return pd_data(
        engine={"max_num_seqs": 8, "dtype": "float32", "hf_overrides": {"b": 1, "a": 2}},
        env={"B": "1", "A": "2", "UCX_TLS": "tcp"},
        roles={"prefill": {"replicas": 2}, "decode": {"engine": {"seed": 3}, "env": {"Z": "1", "C": "1"}}},
        pool={"master_flags": {"v": 1, "eviction_ratio": 0.1}},
        monitoring={"enabled": True},
    )


def test_the_same_input_gives_the_same_bytes() -> None:
    first = plan_to_json(plan_of(rich_data()))
    assert plan_to_json(plan_of(rich_data())) == first
    for seed in range(3):
        assert plan_to_json(plan_of(shuffled(rich_data(), seed))) == first


@pytest.mark.parametrize("data", [rich_data(), colocated_data(), pd_data(pool={"master": "10.9.9.9:50051"})])
def test_a_plan_survives_json(data: JsonDict) -> None:
    plan = plan_of(data)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_what_starts_when_and_what_says_ready() -> None:
    plan = plan_of(pd_data(monitoring={"enabled": True}))
    stages = {unit.name: (unit.start_stage, type(unit.probe)) for unit in plan.units}
    assert stages == {
        "mooncake-master": (0, ListenProbe),
        "storage-prefill-0": (1, MetricProbe),
        "prefill-0": (2, HttpProbe),
        "decode-0": (2, HttpProbe),
        "router": (3, HttpProbe),
        "prometheus": (3, HttpProbe),
    }


class TestPool:
    def test_only_roles_with_capacity_get_a_storage_client(self) -> None:
        plan = plan_of(pd_data())
        assert plan.pool is not None
        assert [(client.name, client.segment_bytes) for client in plan.pool.clients] == [("storage-prefill-0", 2**28)]
        assert [engine.joins_pool for engine in plan.engines] == [True, True]
        assert "--global_segment_size=268435456" in unit(plan, "storage-prefill-0").argv

    def test_capacity_is_the_sum_and_each_client_waits_for_its_share(self) -> None:
        data = pd_data(
            roles={"prefill": {"replicas": 2}, "decode": {"kv_offload": {"cpu": {"num_bytes": "1GiB"}}}},
            trainer_storage={"num_bytes": "2GiB", "nodes": ["n1"]},
        )
        plan = plan_of(data, facts_of(node(0), node(1)))
        assert plan.pool is not None
        assert [(client.name, client.node) for client in plan.pool.clients] == [
            ("storage-prefill-0", "n0"),
            ("storage-prefill-1", "n1"),
            ("storage-decode-0", "n0"),
            ("storage-trainer-0", "n1"),
        ]
        assert plan.pool.capacity_bytes == sum(client.segment_bytes for client in plan.pool.clients) == 3.5 * GIB
        probes = [unit(plan, client.name).probe for client in plan.pool.clients]
        mounted = [probe.at_least for probe in probes if isinstance(probe, MetricProbe)]
        assert mounted == [2**28, 2**29, 2**29 + GIB, 2**29 + 3 * GIB]

    def test_two_replicas_of_a_node_share_one_client(self) -> None:
        plan = plan_of(pd_data(roles={"prefill": {"replicas": 3}}))
        assert plan.pool is not None
        assert [client.name for client in plan.pool.clients] == ["storage-prefill-0"]

    def test_a_joined_master_is_not_started(self) -> None:
        plan = plan_of(pd_data(pool={"master": "10.9.9.9:50051"}))
        assert plan.pool is not None
        assert (plan.pool.master_address, plan.pool.metrics_url) == ("10.9.9.9:50051", None)
        assert [unit.name for unit in plan.units][:2] == ["storage-prefill-0", "prefill-0"]
        assert isinstance(unit(plan, "storage-prefill-0").probe, ListenProbe)
        assert "--master_server_address=10.9.9.9:50051" in unit(plan, "storage-prefill-0").argv

    def test_no_pool_without_a_pooled_role(self) -> None:
        plan = plan_of(pd_data(kv_offload="none", roles={"decode": {"kv_offload": "none"}}))
        assert plan.pool is None
        assert {file.path.name for file in plan.files}.isdisjoint({"mooncake.json"})
        assert not any(name.startswith("MOONCAKE") for name in unit(plan, "prefill-0").env)

    def test_the_disk_tier_lies_on_the_storage_clients_alone(self) -> None:
        data = pd_data(
            kv_offload={**MOONCAKE, "disk": {"path": "/nvme/kv", "num_bytes": "1TiB"}},
            trainer_storage={"num_bytes": "1GiB"},
        )
        plan = plan_of(data)
        assert plan.errors == ()
        with_disk = unit(plan, "storage-prefill-0")
        assert "--enable_offload=true" in with_disk.argv
        assert with_disk.env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] == "/nvme/kv"
        assert with_disk.env["MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"] == str(2**40)
        assert "--enable_offload=true" in unit(plan, "mooncake-master").argv
        assert "--enable_offload=true" not in unit(plan, "storage-trainer-0").argv
        assert json.loads(file_text(plan, "mooncake.json"))["enable_offload"] is True
        assert not any(name.startswith("MOONCAKE_OFFLOAD") for name in unit(plan, "prefill-0").env)


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

    def test_a_colocated_engine_has_no_handoff(self) -> None:
        plan = plan_of(colocated_data())
        env = unit(plan, "colocated-0").env
        assert not any(name.startswith(("VLLM_NIXL", "UCX")) for name in env)
        assert [choice.subject for choice in plan.choices] == ["KV layout", "store transport"]


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


def prefix(plan: JobPlan) -> str:
    """The pool's key prefix, checked to be the one in every store connector."""
    assert plan.pool is not None
    stores = []
    for engine in plan.engines:
        config = transfer(plan, engine.name)
        assert config is not None
        children = config["kv_connector_extra_config"].get("connectors", [config])
        stores += [child["kv_connector_extra_config"] for child in children if "Mooncake" in child["kv_connector"]]
    assert {store["cache_prefix"] for store in stores} == {plan.pool.cache_prefix}
    return plan.pool.cache_prefix


class TestCachePrefix:
    def test_a20_equal_on_all_roles_and_stable(self) -> None:
        assert prefix(plan_of(pd_data())) == prefix(plan_of(pd_data(router={"port": 9000})))
        assert prefix(plan_of(pd_data())).startswith("demo-")

    @pytest.mark.parametrize(
        "changes",
        [
            {"name": "other"},
            {"model": {"revision": "v2"}},
            {"engine": {"kv_cache_dtype": "fp8"}},
            {"engine": {"dtype": "float32"}},
            {"engine": {"block_size": 64}},
            {"engine": {"quantization": "fp8"}},
        ],
    )
    def test_a20_another_job_or_other_kv_has_another(self, changes: JsonDict) -> None:
        assert prefix(plan_of(pd_data(**changes))) != prefix(plan_of(pd_data()))

    def test_a20_other_files_or_another_engine_have_another(self) -> None:
        seen = {
            prefix(plan_of(pd_data(), facts))
            for facts in (facts_of(), facts_of(fingerprint="beef"), gpu_facts())
        }
        assert len(seen) == 3

    def test_the_user_may_choose_it(self) -> None:
        assert prefix(plan_of(pd_data(pool={"cache_prefix": "shared.v1"}))) == "shared.v1"


class TestPorts:
    def listening(self, plan: JobPlan, node_name: str) -> list[int]:
        """All ports of a node, the ranges that store clients pick from included."""
        ports: list[int] = []
        for planned in plan.units:
            if planned.node != node_name:
                continue
            ports += [port.port for port in planned.ports]
            for low, high in (
                ("MC_STORE_CLIENT_MIN_PORT", "MC_STORE_CLIENT_MAX_PORT"),
                ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"),
            ):
                if low in planned.env:
                    ports += range(int(planned.env[low]), int(planned.env[high]) + 1)
        return ports

    def test_a29_every_port_is_distinct_and_below_the_ephemeral_range(self) -> None:
        data = pd_data(
            roles={"prefill": {"replicas": 3}, "decode": {"replicas": 3, "kv_offload": {"cpu": {"num_bytes": 1}}}},
            monitoring={"enabled": True},
        )
        plan = plan_of(data, facts_of(node(0), node(1)))
        for name in ("n0", "n1"):
            ports = self.listening(plan, name)
            assert len(ports) == len(set(ports)) > 10
            assert max(ports) < 32768
        assert 9003 not in self.listening(plan, "n0")

    def test_a29_two_jobs_share_no_port(self) -> None:
        reserved: set[int] = set()
        for index in range(6):
            data = pd_data(name=f"job-{index}", router={"port": 8000 + index}, monitoring={"enabled": True})
            ports = self.listening(plan_of(data, facts_of(reserved_ports=frozenset(reserved))), "n0")
            assert reserved.isdisjoint(ports)
            reserved |= set(ports)

    def test_a29_a_job_keeps_clear_of_others_in_its_own_block_too(self) -> None:
        data = pd_data(ports={"base": 20000}, router={"port": 20003})
        facts = facts_of(reserved_ports=frozenset({20000, 20007}))
        ports = self.listening(plan_of(data, facts), "n0")
        assert ports.count(20003) == 1
        assert {20000, 20007}.isdisjoint(ports)

    def test_ports_run_out_by_name(self) -> None:
        with pytest.raises(PlanRefused, match=r"ports.base: no \d+ ports left between 32760 and 32768 on n0"):
            plan_of(pd_data(ports={"base": 32760}))
        full = frozenset(range(10240, 32768))
        with pytest.raises(PlanRefused, match="every block of ports is planned by another job"):
            plan_of(pd_data(), facts_of(reserved_ports=full))


class TestPlacement:
    def test_two_engines_on_two_cores_get_one_each(self) -> None:
        plan = plan_of(pd_data())
        assert [unit(plan, engine.name).env["VLLM_CPU_OMP_THREADS_BIND"] for engine in plan.engines] == ["0", "1"]

    def test_ranks_of_one_engine_are_bound_apart(self) -> None:
        plan = plan_of(colocated_data(engine={"tensor_parallel_size": 2}))
        assert unit(plan, "colocated-0").env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"

    def test_many_cores_are_shared_out(self) -> None:
        plan = plan_of(pd_data(), facts_of(node(cores=9, address="127.0.0.1")))
        binds = [unit(plan, engine.name).env["VLLM_CPU_OMP_THREADS_BIND"] for engine in plan.engines]
        assert binds == ["0,1,2,3", "4,5,6,7"]

    def test_more_engines_than_cores_take_turns(self) -> None:
        plan = plan_of(pd_data(roles={"decode": {"replicas": 2}}))
        assert [engine.cores for engine in plan.engines] == [((0,),), ((1,),), ((0,),)]

    def test_gpus_are_handed_out_whole_and_in_order(self) -> None:
        data = pd_data(engine={"tensor_parallel_size": 2}, roles={"decode": {"replicas": 2}})
        plan = plan_of(data, gpu_facts(*TWO_NODES))
        assert [(engine.node, engine.gpus) for engine in plan.engines] == [
            ("n0", (0, 1)),
            ("n0", (2, 3)),
            ("n1", (0, 1)),
        ]
        assert unit(plan, "decode-0").env["CUDA_VISIBLE_DEVICES"] == "2,3"

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"engine": {"tensor_parallel_size": 8}}, "one engine needs 8 GPUs, the largest node has 4"),
            ({"roles": {"decode": {"replicas": 9}}}, "9 engines of 1 GPUs do not fit into 8 GPUs"),
        ],
    )
    def test_too_few_gpus_are_refused(self, changes: JsonDict, says: str) -> None:
        with pytest.raises(PlanRefused, match=says):
            plan_of(pd_data(**changes), gpu_facts(*TWO_NODES))

    def test_gpus_may_be_shared_for_a_trial(self) -> None:
        facts = gpu_facts(node(gpus=1, gib=512, address="127.0.0.1"))
        plan = plan_of(pd_data(launch={"share_gpus": True}), facts)
        assert [engine.gpus for engine in plan.engines] == [(0,), (0,)]

    def test_a_node_that_lends_no_core_leaves_its_engines_unbound(self) -> None:
        plan = plan_of(pd_data(), facts_of(node(cores=0, address="127.0.0.1")))
        assert "VLLM_CPU_OMP_THREADS_BIND" not in unit(plan, "prefill-0").env


class TestAddresses:
    def test_a30_two_nodes_tell_each_other_reachable_addresses(self) -> None:
        plan = plan_of(pd_data(monitoring={"enabled": True}), facts_of(node(0), node(1)))
        assert plan.errors == ()
        text = plan_to_json(plan)
        assert "127.0." not in text
        assert "localhost" not in text
        prefill, decode = unit(plan, "prefill-0"), unit(plan, "decode-0")
        for planned, address in ((prefill, "10.0.0.1"), (decode, "10.0.0.2")):
            for variable in ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"):
                assert planned.env[variable] == address
            assert argument(plan, planned.name, "--host") == "0.0.0.0"
        assert plan.pool is not None
        assert plan.pool.master_address.startswith("10.0.0.1:")

    def test_a30_one_node_stays_on_loopback(self) -> None:
        plan = plan_of(pd_data())
        assert argument(plan, "prefill-0", "--host") == "127.0.0.1"
        assert plan.router.url == "http://127.0.0.1:8000"
        assert "0.0.0.0" not in plan_to_json(plan)


def test_a34_paths_with_spaces_stay_whole() -> None:
    path = "/models/my run/a b"
    facts = facts_of(job_dir="/jobs/my run/a b")
    plan = plan_of(
        pd_data(
            engine={"download_dir": path},
            kv_offload={**MOONCAKE, "disk": {"path": "/nvme/k v"}},
            monitoring={"enabled": True},
        ),
        facts,
    )
    assert argument(plan, "prefill-0", "--download-dir") == path
    assert unit(plan, "router").argv[-1] == "/jobs/my run/a b/router.json"
    assert unit(plan, "prefill-0").env["MOONCAKE_CONFIG_PATH"] == "/jobs/my run/a b/mooncake.json"
    assert unit(plan, "storage-prefill-0").env["MOONCAKE_OFFLOAD_FSDIR"] == "/nvme/k v"
    assert any("/jobs/my run/a b/monitoring/prometheus.yml" in part for part in unit(plan, "prometheus").argv)
    written = json.loads(file_text(plan, "inference-prefill.json"))["arguments"]["kv_transfer_config"]
    assert transfer(plan, "prefill-0") == written


class TestLayout:
    def variables(self, plan: JobPlan) -> list[str | None]:
        return [unit(plan, engine.name).env.get("VLLM_KV_CACHE_LAYOUT") for engine in plan.engines]

    def test_cpu_has_nothing_to_choose(self) -> None:
        plan = plan_of(pd_data(), facts_of(abilities=CPU))
        assert self.variables(plan) == [None, None]
        assert argument(plan, "prefill-0", "--block-size") is None
        assert plan.choices[0].value == "LBHNC, a region per layer"

    def test_gpu_gets_block_outermost_rows_and_large_blocks(self) -> None:
        plan = plan_of(pd_data(), gpu_facts())
        assert self.variables(plan) == ["BLHNC", "BLHNC"]
        assert [argument(plan, engine.name, "--block-size") for engine in plan.engines] == ["128", "128"]
        assert [choice.value for choice in plan.choices[:2]] == ["BLHNC", "128"]

    @pytest.mark.parametrize("attention", ["mla", "other"])
    def test_large_blocks_are_for_full_attention_only(self, attention: Any) -> None:
        plan = plan_of(pd_data(), gpu_facts(attention=attention))
        assert self.variables(plan) == ["BLHNC", "BLHNC"]
        assert argument(plan, "prefill-0", "--block-size") is None

    def test_the_users_block_size_and_layout_stay(self) -> None:
        plan = plan_of(pd_data(engine={"block_size": 16}), gpu_facts())
        assert argument(plan, "prefill-0", "--block-size") == "16"
        chosen = plan_of(pd_data(env={"VLLM_KV_CACHE_LAYOUT": "LBNHC"}), gpu_facts())
        assert self.variables(chosen) == ["LBNHC", "LBNHC"]
        assert argument(chosen, "prefill-0", "--block-size") is None

    def test_an_older_engine_gets_one_region_for_all_layers(self) -> None:
        plan = plan_of(pd_data(kv_offload={"save_decode_cache": False}), gpu_facts(abilities=GPU_OLD))
        for engine in plan.engines:
            assert unit(plan, engine.name).env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
            assert str(transfer(plan, engine.name)).count("'enable_cross_layers_blocks': 'True'") == 2

    def test_roles_of_unequal_tensor_parallel_size_keep_the_connectors_layout(self) -> None:
        none = {"kv_offload": "none"}
        data = pd_data(roles={"prefill": none, "decode": {**none, "engine": {"tensor_parallel_size": 2}}})
        plan = plan_of(data, gpu_facts())
        assert self.variables(plan) == [None, None]
        assert "tensor_parallel_size" in plan.choices[0].reason

    @pytest.mark.parametrize(("nvlink", "zcopy"), [(True, None), (False, "on"), (None, "on")])
    def test_ucx_without_nvlink_is_told_to_copy_directly(self, nvlink: bool | None, zcopy: str | None) -> None:
        plan = plan_of(pd_data(handoff={} if nvlink is None else {"nvlink": nvlink}), gpu_facts())
        assert unit(plan, "prefill-0").env.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY") == zcopy

    def test_cpu_handoffs_stay_on_loopback_only_on_one_node(self) -> None:
        assert unit(plan_of(pd_data()), "prefill-0").env["UCX_NET_DEVICES"] == "lo"
        two = plan_of(pd_data(), facts_of(node(0), node(1)))
        assert "UCX_NET_DEVICES" not in unit(two, "prefill-0").env
