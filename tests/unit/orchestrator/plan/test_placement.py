"""Replicas on nodes, GPUs and cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connectors.types import JsonDict
from orchestrator.errors import PlanRefused
from tests.unit.orchestrator.samples import (
    colocated_data,
    error_at,
    facts_of,
    gpu_facts,
    node,
    pd_data,
    plan_of,
    unit,
    warning_at,
)

TWO_NODES = (node(0, gpus=4, gib=512), node(1, gpus=4, gib=512))


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
            ("n0", ("0", "1")),
            ("n0", ("2", "3")),
            ("n1", ("0", "1")),
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

    def test_no_gpu_at_all_is_refused(self) -> None:
        with pytest.raises(PlanRefused, match="needs 1 GPUs, and no node has any; start it where GPUs are"):
            plan_of(pd_data(), gpu_facts(node(gpus=0)))

    def test_gpus_may_be_shared_for_a_trial(self) -> None:
        facts = gpu_facts(node(gpus=1, gib=512, address="127.0.0.1"))
        plan = plan_of(pd_data(launch={"share_gpus": True}), facts)
        assert [engine.gpus for engine in plan.engines] == [("0",), ("0",)]

    def test_only_gpus_of_the_users_allotment_are_handed_out(self) -> None:
        mine = replace(node(gpus=2, gib=512, address="127.0.0.1"), visible_gpus=("5", "GPU-1a2b"))
        plan = plan_of(pd_data(), gpu_facts(mine))
        assert [unit(plan, engine.name).env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines] == ["5", "GPU-1a2b"]

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_a_job_of_another_launcher_is_shown_also_where_gpus_are_too_few(self, gpus: int) -> None:
        data = pd_data(launch={"backend": "slurm"}, roles={"decode": {"replicas": 3}})
        facts = gpu_facts(node(gpus=gpus, gib=512, address="127.0.0.1"))
        plan = plan_of(data, facts)
        assert len(plan.engines) == 4
        assert "GPUs" in error_at(plan, "roles.decode.replicas").problem
        found = warning_at(plan, "launch.backend")
        assert found.problem == "planned for this machine's one node; slurm is not launched by this version"
        assert plan.findings[0].severity == "error"
        with pytest.raises(PlanRefused, match="roles.decode.replicas"):
            plan_of(data, replace(facts, backends=("local", "slurm")))

    def test_a_node_that_lends_no_core_leaves_its_engines_unbound(self) -> None:
        plan = plan_of(pd_data(), facts_of(node(cores=0, address="127.0.0.1")))
        assert "VLLM_CPU_OMP_THREADS_BIND" not in unit(plan, "prefill-0").env
