"""What only running engines can tell, judged: do their caches agree (A19), does the pool ever answer (A21).

`observe/engines.py` collects the answers, `loop.py` makes the finding the job's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from connectors.engine_client import CacheConfig
from orchestrator.plan.types import EnginePlan


@dataclass(frozen=True, kw_only=True)
class StartupFinding:
    severity: Literal["fail", "warn"]
    text: str


def caches_agree(engines: Sequence[EnginePlan], reported: Mapping[str, CacheConfig]) -> StartupFinding | None:
    """[A19] Engines that hand KV to each other or share a pool must report one block size and cache dtype.

    Some models change the block size that was asked for; then blocks do not fit, or a pool never hits.
    """
    first = next((engine for engine in engines if engine.name in reported), None)
    if first is None:
        return None
    wanted = reported[first.name]
    for engine in engines:
        got = reported.get(engine.name, wanted)
        for name, left, right in (
            ("block size", wanted.block_size, got.block_size),
            ("cache dtype", wanted.cache_dtype, got.cache_dtype),
        ):
            if left != right:
                text = (
                    f"{first.name} reports {name} {left}, {engine.name} reports {right}: their KV does not fit together"
                )
                return StartupFinding(severity="fail", text=f"{text}; set engine.block_size and kv_cache_dtype alike")
    return None


@dataclass(frozen=True, kw_only=True)
class OffloadProbe:
    """One prompt sent twice to one engine, its own cache cleared in between."""

    engine: str
    prompt_tokens: int
    external_hit_tokens: float
    problem: str = ""
    """Why the probe could not be made, where it could not."""


def pool_answers(probe: OffloadProbe, severity: Literal["fail", "warn"], vllm_version: str) -> StartupFinding | None:
    """[A21] The second time, the prompt must come from the pool."""
    if probe.problem:
        return StartupFinding(severity=severity, text=f"offload not proved on {probe.engine}: {probe.problem}")
    if probe.external_hit_tokens > 0:
        return None
    text = (
        f"offload ineffective: {probe.engine} sent a prompt of {probe.prompt_tokens} tokens twice and the pool gave "
        f"0 of them back (vLLM {vllm_version}); see the engine's log for MooncakeStore errors"
    )
    return StartupFinding(severity=severity, text=text)
