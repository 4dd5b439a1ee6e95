"""What is placed on a node fits into its memory."""

from __future__ import annotations

import pytest

from connectors.types import JsonDict
from tests.unit.orchestrator.samples import (
    GIB,
    MOONCAKE,
    assert_error,
    colocated_data,
    facts_of,
    gpu_facts,
    node,
    pd_data,
    plan_of,
)

DISK: JsonDict = {"disk": {"path": "/nvme/kv"}}


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
        facts = facts_of(node(gib=2.1, address="127.0.0.1"), weight_bytes=0)
        assert plan_of(data, facts).errors == ()
        tight = facts_of(node(gib=1.9, address="127.0.0.1"), weight_bytes=0)
        says = ("staging of storage-prefill-0 1.25 GiB", "drop the disk tier")
        assert_error(data, "kv_offload.disk", *says, facts=tight)

    def test_a_native_tier_counts_per_engine(self) -> None:
        data = colocated_data(
            kv_offload={"type": "native", "cpu": {"num_bytes": "10GiB"}}, roles={"colocated": {"replicas": 3}}
        )
        one = node(gpus=4, gib=25, address="127.0.0.1")
        assert_error(data, self.field, "need 30.00 GiB", "native tier of colocated-0", facts=gpu_facts(one))

    def test_prefetched_weights_count_on_gpus_too(self) -> None:
        data = pd_data(weights={"load_mode": "cpu_prefetch"})
        facts = gpu_facts(node(gpus=2, gib=64, address="127.0.0.1"), weight_bytes=40 * GIB)
        assert_error(data, "weights.load_mode", "prefetched weights of prefill-0 40.00 GiB", "gpu_fetch", facts=facts)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"pool": {"local_buffer_bytes": "30GiB"}}, "pool.local_buffer_bytes"),
            ({"engine": {"kv_cache_memory_bytes": 30 * GIB}}, "engine.kv_cache_memory_bytes"),
            (
                {"roles": {"decode": {"engine": {"kv_cache_memory_bytes": 30 * GIB}}}},
                "roles.decode.engine.kv_cache_memory_bytes",
            ),
            ({"env": {"VLLM_CPU_KVCACHE_SPACE": "30"}}, "env.VLLM_CPU_KVCACHE_SPACE"),
            ({"trainer_storage": {"num_bytes": "30GiB"}}, "trainer_storage.num_bytes"),
        ],
    )
    def test_the_largest_part_gives_the_field(self, changes: JsonDict, field: str) -> None:
        assert_error(pd_data(**changes), field, "30.00 GiB", "or place less on a node")

    def test_two_nodes_are_counted_apart(self) -> None:
        data = pd_data(kv_offload={**MOONCAKE, "cpu": {"num_bytes": "19GiB"}})
        assert plan_of(data, facts_of(node(0), node(1))).errors == ()
        assert_error(data, self.field, "n0 has 8.00 GiB", facts=facts_of(node(0, gib=8), node(1)))
