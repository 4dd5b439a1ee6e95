"""What only running engines can tell, judged: do their caches agree (A19), does the pool ever answer (A21).

`observe/engines.py` collects the answers, `start.py` makes the finding the job's state.
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

    Some models change the block size that was asked for; then blocks do not fit, or a pool never hits. Where an engine
    does not report, that is said: nothing was compared.
    """
    answered = [engine.name for engine in engines if engine.name in reported]
    for first, other in ((answered[0], name) for name in answered[1:]):
        difference = _difference(first, reported[first], other, reported[other])
        if difference is not None:
            mend = "set engine.block_size and engine.kv_cache_dtype alike"
            return StartupFinding(severity="fail", text=f"{difference}: their KV does not fit together; {mend}")
    silent = [engine.name for engine in engines if engine.name not in reported]
    if silent and len(engines) > 1:
        text = f"caches not compared: {', '.join(silent)} did not report block size and cache dtype"
        return StartupFinding(severity="warn", text=text)
    return None


def _difference(first: str, left: CacheConfig, other: str, right: CacheConfig) -> str | None:
    if left.block_size != right.block_size:
        return f"{first} reports block size {left.block_size}, {other} reports {right.block_size}"
    if left.cache_dtype != right.cache_dtype:
        return f"{first} reports cache dtype {left.cache_dtype}, {other} reports {right.cache_dtype}"
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
