"""The pool's own processes, and the prefix of its keys."""

from __future__ import annotations

import json

import pytest

from connectors.types import JsonDict
from deploy.unit import ListenProbe, MetricProbe
from orchestrator.plan.types import JobPlan
from tests.unit.orchestrator.samples import (
    GIB,
    MOONCAKE,
    facts_of,
    file_text,
    gpu_facts,
    node,
    pd_data,
    plan_of,
    transfer,
    unit,
)


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

    def test_a20_a_job_of_the_same_name_elsewhere_has_other_keys_on_a_joined_master(self) -> None:
        joined = pd_data(pool={"master": "10.9.9.9:50051"})
        here, there = plan_of(joined), plan_of(joined, facts_of(job_dir="/other/demo"))
        assert prefix(here) != prefix(there)
        assert prefix(plan_of(pd_data())) == prefix(plan_of(pd_data(), facts_of(job_dir="/other/demo")))

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
        seen = {prefix(plan_of(pd_data(), facts)) for facts in (facts_of(), facts_of(fingerprint="beef"), gpu_facts())}
        assert len(seen) == 3

    def test_the_user_may_choose_it(self) -> None:
        assert prefix(plan_of(pd_data(pool={"cache_prefix": "shared.v1"}))) == "shared.v1"
