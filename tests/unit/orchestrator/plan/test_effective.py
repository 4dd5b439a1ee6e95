"""What the planner chooses where the job file is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connectors.types import Choice, JsonDict
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import JobPlan
from tests.unit.orchestrator.samples import GIB, argument, facts_of, gpu_facts, node, pd_data, plan_of

SLOW = replace(node(address="127.0.0.1"), bf16=False)


def arguments(plan: JobPlan, flag: str) -> list[str | None]:
    return [argument(plan, engine.name, flag) for engine in plan.engines]


def choice(plan: JobPlan, subject: str) -> Choice | None:
    return next((choice for choice in plan.choices if choice.subject == subject), None)


class TestDtype:
    def test_a_cpu_without_bfloat16_computes_in_float32(self) -> None:
        plan = plan_of(pd_data(), facts_of(SLOW))
        assert plan.errors == ()
        assert arguments(plan, "--dtype") == ["float32", "float32"]
        chosen = choice(plan, "dtype")
        assert chosen is not None
        assert "ten times slower" in chosen.reason

    @pytest.mark.parametrize("facts", [facts_of(), gpu_facts()])
    def test_other_engines_keep_the_models_own(self, facts: ClusterFacts) -> None:
        plan = plan_of(pd_data(), facts)
        assert arguments(plan, "--dtype") == [None, None]
        assert choice(plan, "dtype") is None

    def test_the_users_is_stronger(self) -> None:
        plan = plan_of(pd_data(engine={"dtype": "bfloat16"}), facts_of(SLOW))
        assert arguments(plan, "--dtype") == ["bfloat16", "bfloat16"]
        assert choice(plan, "dtype") is None

    def test_a19_a_role_that_says_what_is_chosen_agrees_with_one_that_is_silent(self) -> None:
        plan = plan_of(pd_data(roles={"decode": {"engine": {"dtype": "float32"}}}), facts_of(SLOW))
        assert plan.errors == ()

    def test_a20_the_pools_prefix_follows_what_engines_get(self) -> None:
        def prefix(data: JsonDict, facts: ClusterFacts) -> str:
            pool = plan_of(data, facts).pool
            assert pool is not None
            return pool.cache_prefix

        silent, said = pd_data(), pd_data(engine={"dtype": "float32"})
        assert prefix(silent, facts_of(SLOW)) == prefix(said, facts_of(SLOW))
        assert prefix(silent, facts_of(SLOW)) != prefix(silent, facts_of())
        large = pd_data(engine={"block_size": 128}, env={"VLLM_KV_CACHE_LAYOUT": "BLHNC"})
        assert prefix(silent, gpu_facts()) == prefix(large, gpu_facts())


class TestKvBytes:
    @pytest.mark.parametrize(("gib", "share"), [(16, 2 * GIB), (256, 4 * GIB)])
    def test_a_cpu_engine_takes_a_bounded_share(self, gib: int, share: int) -> None:
        plan = plan_of(pd_data(), facts_of(node(gib=gib, address="127.0.0.1")))
        assert arguments(plan, "--kv-cache-memory-bytes") == [str(share)] * 2
        chosen = choice(plan, "KV cache")
        assert chosen is not None
        assert chosen.value == f"{share / GIB:.2f} GiB per engine (prefill, decode)"

    def test_ranks_of_one_engine_divide_it(self) -> None:
        plan = plan_of(pd_data(engine={"tensor_parallel_size": 2}), facts_of(node(gib=16, address="127.0.0.1")))
        assert arguments(plan, "--kv-cache-memory-bytes") == [str(GIB)] * 2

    def test_the_users_is_stronger_and_gpus_have_a_memory_of_their_own(self) -> None:
        data = pd_data(roles={"prefill": {"engine": {"kv_cache_memory_bytes": 7}}})
        assert arguments(plan_of(data), "--kv-cache-memory-bytes") == ["7", str(3 * GIB)]
        assert arguments(plan_of(pd_data(), gpu_facts()), "--kv-cache-memory-bytes") == [None, None]
        space = plan_of(pd_data(env={"VLLM_CPU_KVCACHE_SPACE": "1"}))
        assert arguments(space, "--kv-cache-memory-bytes") == [None, None]
        assert choice(space, "KV cache") is None


class TestEager:
    def engines(self, plan: JobPlan) -> list[tuple[bool, str | None]]:
        """Of each engine: whether it is eager, and what it is told about the compiler."""
        names = {engine.name for engine in plan.engines}
        units = [unit for unit in plan.units if unit.name in names]
        return [("--enforce-eager" in unit.argv, unit.env.get("TORCHDYNAMO_DISABLE")) for unit in units]

    def test_few_cores_compile_nothing(self) -> None:
        assert self.engines(plan_of(pd_data(), facts_of(SLOW))) == [(True, "1"), (True, "1")]

    def test_many_cores_compile(self) -> None:
        many = replace(SLOW, cores=tuple(range(64)))
        assert self.engines(plan_of(pd_data(), facts_of(many))) == [(False, None), (False, None)]

    def test_the_user_decides(self) -> None:
        plan = plan_of(pd_data(engine={"enforce_eager": False}), facts_of(SLOW))
        assert self.engines(plan) == [(False, None), (False, None)]
        plan = plan_of(pd_data(env={"TORCHDYNAMO_DISABLE": "0"}), facts_of(SLOW))
        assert self.engines(plan) == [(True, "0"), (True, "0")]

    def test_gpus_are_left_alone(self) -> None:
        plan = plan_of(pd_data(engine={"enforce_eager": True}), gpu_facts())
        assert self.engines(plan) == [(True, None)] * len(plan.engines)
