"""Roles as resolved + facts -> roles as their engines get them: what the planner chooses where the user said nothing.

`resolve.py` comes before it, placement, rules and units after; they all see one set of values. Each choice is weaker
than the job file, is the same for every role, and is told with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from connectors.engine_env import KV_SPACE_VARIABLE, NO_COMPILER_VARIABLE
from connectors.layout import LAYOUT_VARIABLE, LayoutChoice, choose_layout
from connectors.types import Choice, EngineAbilities
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.resolve import RoleConfig
from orchestrator.spec.offload import MooncakeOffload

MOST_CPU_KV_BYTES = 4 * 2**30
CPU_KV_SHARE = 8
"""A CPU engine's KV cache is at most this part of its node's memory: vLLM's own default takes about half of it, for
each engine, so two engines of one node would not start."""


FEW_CORES = 8
"""With fewer cores per rank, compiling a model takes minutes and gains little."""


@dataclass(frozen=True, kw_only=True)
class EffectiveRoles:
    roles: tuple[RoleConfig, ...]
    layout: LayoutChoice
    choices: tuple[Choice, ...]


def choose_defaults(roles: Sequence[RoleConfig], facts: ClusterFacts, abilities: EngineAbilities) -> EffectiveRoles:
    """The roles with everything that was chosen filled in."""
    layout = _layout(roles, facts, abilities)
    choices = list(layout.choices)
    filled = [
        replace(role, engine=_weaker(role.engine, {"block_size": layout.block_size}), env={**layout.env, **role.env})
        for role in roles
    ]
    if abilities.platform == "cpu":
        filled = _choose_dtype(filled, facts, choices)
        filled = _choose_kv_bytes(filled, facts, choices)
        filled = _choose_eager(filled, facts, choices)
    ordered = (replace(role, env=dict(sorted(role.env.items()))) for role in filled)
    return EffectiveRoles(roles=tuple(ordered), layout=layout, choices=tuple(choices))


def _weaker(engine: Mapping[str, object], chosen: Mapping[str, object]) -> dict[str, object]:
    """`engine` with what it leaves open; a value of None leaves it open."""
    missing = {name: value for name, value in chosen.items() if value is not None and engine.get(name) is None}
    return dict(sorted({**engine, **missing}.items()))


def _layout(roles: Sequence[RoleConfig], facts: ClusterFacts, abilities: EngineAbilities) -> LayoutChoice:
    if all(role.role == "colocated" and not isinstance(role.offload, MooncakeOffload) for role in roles):
        return LayoutChoice()
    sizes = [role.engine["block_size"] for role in roles if role.engine.get("block_size") is not None]
    layouts = [role.env[LAYOUT_VARIABLE] for role in roles if LAYOUT_VARIABLE in role.env]
    return choose_layout(
        abilities,
        attention=facts.model.attention,
        user_block_size=next(iter(sizes), None),
        user_layout=next(iter(layouts), None),
        same_tensor_parallel=len({role.sizes.tensor for role in roles}) == 1,
    )


def _choose_dtype(roles: Sequence[RoleConfig], facts: ClusterFacts, choices: list[Choice]) -> list[RoleConfig]:
    slow = [node.name for node in facts.nodes if not node.bf16]
    if not slow or all(role.engine.get("dtype") is not None for role in roles):
        return list(roles)
    reason = f"the CPU of {slow[0]} has no bfloat16 instructions, and emulating them is about ten times slower"
    choices.append(Choice(subject="dtype", value="float32", reason=reason))
    return [replace(role, engine=_weaker(role.engine, {"dtype": "float32"})) for role in roles]


def _choose_kv_bytes(roles: Sequence[RoleConfig], facts: ClusterFacts, choices: list[Choice]) -> list[RoleConfig]:
    """vLLM counts per rank, the share is an engine's."""
    name = "kv_cache_memory_bytes"
    share = min(MOST_CPU_KV_BYTES, min(node.memory_bytes for node in facts.nodes) // CPU_KV_SHARE)
    silent = [role.role for role in roles if role.engine.get(name) is None and KV_SPACE_VARIABLE not in role.env]
    if not share or not silent:
        return list(roles)
    reason = f"engines of one node share its memory; to choose it yourself, set engine.{name}"
    value = f"{share / 2**30:.2f} GiB per engine ({', '.join(silent)})"
    choices.append(Choice(subject="KV cache", value=value, reason=reason))
    return [
        replace(role, engine=_weaker(role.engine, {name: share // role.sizes.ranks})) if role.role in silent else role
        for role in roles
    ]


def _choose_eager(roles: Sequence[RoleConfig], facts: ClusterFacts, choices: list[Choice]) -> list[RoleConfig]:
    """Eager engines compile nothing at all: vLLM still compiles small helpers at the first request that needs them,
    which takes tens of seconds on two cores, needs a C++ compiler, and fails where the path has a space (A34)."""
    ranks = sum(role.replicas * role.sizes.ranks for role in roles)
    cores = sum(len(node.cores) for node in facts.nodes) // max(1, ranks)
    if cores < FEW_CORES and any(role.engine.get("enforce_eager") is None for role in roles):
        reason = f"{cores} cores per rank: compiling takes minutes; set engine.enforce_eager = false to compile"
        choices.append(Choice(subject="enforce_eager", value="true", reason=reason))
        roles = [replace(role, engine=_weaker(role.engine, {"enforce_eager": True})) for role in roles]
    eager = [role.role for role in roles if role.engine.get("enforce_eager") is True]
    if eager:
        reason = "an eager engine compiles nothing, at the first request either, and needs no C++ compiler"
        choices.append(Choice(subject="torch compiler", value=f"off ({', '.join(eager)})", reason=reason))
    off = {NO_COMPILER_VARIABLE: "1"}
    return [replace(role, env={**off, **role.env}) if role.role in eager else role for role in roles]
