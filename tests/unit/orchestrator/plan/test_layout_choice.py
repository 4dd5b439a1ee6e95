"""KV layout, block size and UCX settings, by what the engine can do."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.types import JsonDict
from orchestrator.plan.types import JobPlan
from tests.unit.orchestrator.samples import (
    CPU,
    GPU_OLD,
    argument,
    facts_of,
    gpu_facts,
    node,
    pd_data,
    plan_of,
    transfer,
    unit,
)


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
        assert "to switch it off, set env.VLLM_KV_CACHE_LAYOUT" in plan.choices[0].reason

    @pytest.mark.parametrize("attention", ["mla", "other"])
    def test_a_named_layout_and_large_blocks_are_for_full_attention_only(self, attention: Any) -> None:
        plan = plan_of(pd_data(), gpu_facts(attention=attention))
        assert self.variables(plan) == [None, None]
        assert f"attention is {attention!r}" in plan.choices[0].reason
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

    @pytest.mark.parametrize(
        ("changes", "pinned", "says"),
        [
            ({}, None, "what UCX finds best; pin it with handoff.transport"),
            ({"pool": {"protocol": "rdma"}}, None, "by RDMA"),
            ({"handoff": {"transport": "rdma"}}, None, "by RDMA"),
            ({"handoff": {"transport": "tcp"}}, "cuda_ipc,cuda_copy,sm,tcp,self", "by tcp"),
            (
                {"handoff": {"transport": "tcp"}, "pool": {"protocol": "rdma"}},
                "cuda_ipc,cuda_copy,sm,tcp,self",
                "by tcp",
            ),
        ],
    )
    def test_how_handoffs_cross_nodes_is_not_the_pools_protocol(
        self, changes: JsonDict, pinned: str | None, says: str
    ) -> None:
        plan = plan_of(pd_data(**changes), gpu_facts(node(0, gpus=1, gib=512), node(1, gpus=1, gib=512)))
        env = unit(plan, "prefill-0").env
        assert (env.get("UCX_TLS"), env.get("UCX_NET_DEVICES")) == (pinned, None)
        assert says in next(choice.reason for choice in plan.choices if choice.subject == "UCX")

    def test_rdma_asked_for_on_one_node_is_not_held_to_loopback(self) -> None:
        plan = plan_of(pd_data(handoff={"transport": "rdma"}), gpu_facts())
        assert "UCX_NET_DEVICES" not in unit(plan, "prefill-0").env

    def test_cpu_handoffs_stay_on_loopback_only_on_one_node(self) -> None:
        assert unit(plan_of(pd_data()), "prefill-0").env["UCX_NET_DEVICES"] == "lo"
        two = plan_of(pd_data(), facts_of(node(0), node(1)))
        assert "UCX_NET_DEVICES" not in unit(two, "prefill-0").env
