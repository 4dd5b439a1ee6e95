"""What running engines tell, judged."""

from __future__ import annotations

from typing import Literal

import pytest

from connectors.engine_client import CacheConfig
from orchestrator.plan.types import EnginePlan
from orchestrator.supervisor.startup_checks import OffloadProbe, caches_agree, pool_answers


def engine(name: str) -> EnginePlan:
    role: Literal["prefill", "decode"] = "prefill" if name.startswith("prefill") else "decode"
    return EnginePlan(
        name=name,
        role=role,
        node="n0",
        url="http://x",
        gpus=(),
        ranks=1,
        cores=(),
        joins_pool=True,
        token_file="/token",
    )


ENGINES = [engine("prefill-0"), engine("prefill-1"), engine("decode-0")]


def config(block_size: int = 32, cache_dtype: str = "auto") -> CacheConfig:
    return CacheConfig(block_size=block_size, cache_dtype=cache_dtype)


def test_a19_block_sizes_that_the_engines_changed() -> None:
    reported = {"prefill-0": config(4192), "prefill-1": config(4192), "decode-0": config(2112)}
    finding = caches_agree(ENGINES, reported)
    assert finding is not None
    assert finding.severity == "fail"
    for word in ("prefill-0", "4192", "decode-0", "2112", "engine.block_size"):
        assert word in finding.text


def test_a19_cache_dtypes() -> None:
    finding = caches_agree(ENGINES, {"prefill-0": config(), "prefill-1": config(cache_dtype="fp8")})
    assert finding is not None
    assert finding.severity == "fail"
    assert "prefill-0 reports cache dtype auto, prefill-1 reports fp8" in finding.text


def test_equal_caches_are_fine() -> None:
    assert caches_agree(ENGINES, {one.name: config() for one in ENGINES}) is None


@pytest.mark.parametrize("answered", [(), ("decode-0",), ("prefill-0", "decode-0")])
def test_an_engine_that_does_not_report_is_named(answered: tuple[str, ...]) -> None:
    finding = caches_agree(ENGINES, {name: config() for name in answered})
    assert finding is not None
    assert finding.severity == "warn"
    for one in ENGINES:
        assert (one.name in finding.text) == (one.name not in answered)


def test_one_engine_has_nobody_to_disagree_with() -> None:
    assert caches_agree(ENGINES[:1], {}) is None


@pytest.mark.parametrize("severity", ["warn", "fail"])
def test_a21_a_dead_store_is_named_with_the_vllm_version(severity: Literal["warn", "fail"]) -> None:
    probe = OffloadProbe(engine="prefill-0", prompt_tokens=66, external_hit_tokens=0)
    finding = pool_answers(probe, severity, "0.32.0")
    assert finding is not None
    assert finding.severity == severity
    for word in ("offload ineffective", "prefill-0", "66 tokens", "vLLM 0.32.0"):
        assert word in finding.text


def test_a21_hits_are_no_finding() -> None:
    assert pool_answers(OffloadProbe(engine="p", prompt_tokens=66, external_hit_tokens=64), "warn", "0.32.0") is None


def test_a21_a_probe_that_could_not_be_made_proves_nothing() -> None:
    probe = OffloadProbe(engine="p", prompt_tokens=66, external_hit_tokens=0, problem="POST /v1/completions: timed out")
    finding = pool_answers(probe, "warn", "0.32.0")
    assert finding is not None
    assert "not proved on p: POST /v1/completions: timed out" in finding.text
