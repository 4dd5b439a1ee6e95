"""What a block of KV is: roles that share blocks must mean the same by them."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.types import JsonDict
from tests.unit.orchestrator.samples import (
    assert_error,
    gpu_facts,
    pd_data,
    plan_of,
)


def roles(**decode: Any) -> JsonDict:
    return {"roles": {"decode": decode}}


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
    engine = {
        "tensor_parallel_size": 1,
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "prefix_caching_hash_algo": "sha256",
    }
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
        pd_data(**roles(env={"PYTHONHASHSEED": "7"})),
        "roles.decode.env.PYTHONHASHSEED",
        "is '7'",
        "gets '0'",
        "drop it",
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
