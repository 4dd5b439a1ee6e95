"""Which KV layout an engine gets, so that a handoff needs few NIXL descriptors and the store few pieces.

The number of descriptors decides the speed of a handoff (about 2.7 microseconds each to post, inside the engine's
step), not the medium: block 16 with a region per layer moved 9 GB/s where one region for all layers moved 610 and
more on the same GPU. What each vLLM offers differs, so the choice is made from its abilities, never from its version.

- enable_cross_layers_blocks on both connectors (vLLM 0.25.1): one region for all layers. Only model runner 1
  allocates it.
- VLLM_KV_CACHE_LAYOUT=BLHNC (vLLM 0.32): all layers of a block lie in one row, and the store moves a block as one
  piece. NIXL still takes a descriptor per layer and block there, so larger blocks are chosen as well. BHLNC would
  give NIXL one region, but the store then cuts every block into a piece per layer and head. Only for full attention:
  0.32 does not start when an attention backend has no such layout.
- CPU attention reads head-major blocks of one layer only (LBHNC): nothing to choose but the block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from connectors.types import Choice, EngineAbilities

Attention = Literal["full", "mla", "other"]
"""What the model's config says of its attention. Only "full" is known to take any block size."""

LARGE_BLOCK = 128
LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
LAYOUT_VARIABLES = (LAYOUT_VARIABLE, RUNNER_VARIABLE)
"""Everything in an engine's environment that decides how KV lies in a block."""


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    cross_layers_blocks: bool = False
    env: dict[str, str] = field(default_factory=dict)
    block_size: int | None = None
    """Set where neither the user nor vLLM's default should decide."""
    choices: tuple[Choice, ...] = ()


def choose_layout(
    abilities: EngineAbilities,
    *,
    attention: Attention,
    user_block_size: int | None,
    user_layout: str | None,
    same_tensor_parallel: bool,
) -> LayoutChoice:
    """The layout for every role of a job. `same_tensor_parallel`: prefill and decode split heads alike, which a row
    of all layers needs (a rank can then be read as a whole)."""
    subject = "KV layout"
    if user_layout is not None:
        return _keep(subject, user_layout, f"set by the user in env.{LAYOUT_VARIABLE}")
    if abilities.platform == "cpu":
        return _keep(subject, "LBHNC, a region per layer", "CPU attention reads head-major blocks of one layer only")
    if not same_tensor_parallel:
        return _keep(subject, "the connector's own", "roles differ in tensor_parallel_size, heads must be cut")
    if abilities.cross_layers_blocks:
        reason = "both connectors read enable_cross_layers_blocks; model runner 1 allocates that layout"
        choice = Choice(subject=subject, value="one region for all layers", reason=reason)
        env = {RUNNER_VARIABLE: "0"}
        return LayoutChoice(cross_layers_blocks=True, env=env, choices=(choice,))
    if "BLHNC" in abilities.kv_cache_layouts:
        if attention != "full":
            reason = f"attention is {attention!r}, whose backends may refuse a named layout; set env.{LAYOUT_VARIABLE}"
            return _keep(subject, "the connector's own", reason)
        reason = "a block of all layers is one piece for the store; NIXL posts a descriptor per layer and block"
        reason += f'; to switch it off, set env.{LAYOUT_VARIABLE} to another, such as "LBNHC"'
        choices = [Choice(subject=subject, value="BLHNC", reason=reason)]
        block_size = None
        if user_block_size is None:
            block_size = LARGE_BLOCK
            reason = f"{LARGE_BLOCK // 16} times fewer NIXL descriptors than with blocks of 16"
            choices.append(Choice(subject="block size", value=str(LARGE_BLOCK), reason=reason))
        return LayoutChoice(env={LAYOUT_VARIABLE: "BLHNC"}, block_size=block_size, choices=tuple(choices))
    return _keep(subject, "the connector's own", f"vLLM {abilities.vllm_version} offers no block-outermost layout")


def _keep(subject: str, value: str, reason: str) -> LayoutChoice:
    return LayoutChoice(choices=(Choice(subject=subject, value=value, reason=reason),))
