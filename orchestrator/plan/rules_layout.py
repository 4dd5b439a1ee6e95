"""Rules on what a block of KV is: roles that share blocks must mean the same by them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from connectors.engine_argv import HANDED_LAYOUT_ARGUMENTS, SHARED_LAYOUT_ARGUMENTS
from connectors.engine_env import HASH_SEED
from connectors.layout import LAYOUT_VARIABLE
from orchestrator.plan.resolve import RoleConfig, engine_field, env_field
from orchestrator.plan.rules_base import CheckInput, error, shown
from orchestrator.plan.types import Finding

CPU_BLOCK_MULTIPLE = 32


def shared_layout(given: CheckInput) -> Iterator[Finding]:
    """[A19] Blocks of roles that share a pool must be the same blocks."""
    for first, second in pairwise(role.config for role in given.pooled):
        for name in SHARED_LAYOUT_ARGUMENTS:
            mend = f'give both roles one {name}, or set kv_offload = "none" on one of them'
            yield from _differs(given, first, second, name, "both use the pool", mend)


def handed_layout(given: CheckInput) -> Iterator[Finding]:
    """[A19] A handoff is read as it lies: prefill and decode store KV alike, whether or not they share a pool."""
    pooled = {role.name for role in given.pooled}
    for first, second in pairwise(given.split):
        if not {first.role, second.role} <= pooled:
            for name in HANDED_LAYOUT_ARGUMENTS:
                mend = f"give both roles one {name}"
                yield from _differs(given, first, second, name, "decode reads what prefill wrote", mend)
        left, right = first.env.get(LAYOUT_VARIABLE), second.env.get(LAYOUT_VARIABLE)
        if left != right:
            owner = second if right is not None else first
            problem = f"{second.role} has {shown(right)}, {first.role} has {shown(left)}"
            yield error(env_field(given.spec, owner.role, LAYOUT_VARIABLE), problem, f"set env.{LAYOUT_VARIABLE}")


def _differs(
    given: CheckInput, first: RoleConfig, second: RoleConfig, name: str, why: str, mend: str
) -> Iterator[Finding]:
    default = SHARED_LAYOUT_ARGUMENTS[name]
    left, right = first.engine.get(name, default), second.engine.get(name, default)
    if left != right:
        owner = second if name in getattr(given.spec.roles, second.role).engine else first
        problem = f"{second.role} has {shown(right)}, {first.role} has {shown(left)}, and {why}"
        yield error(engine_field(given.spec, owner.role, name), problem, mend)


def one_hash_seed(given: CheckInput) -> Iterator[Finding]:
    """[A23] Block hashes of two processes meet only if their hash seeds are equal."""
    for role in given.roles:
        seed = role.env.get("PYTHONHASHSEED", HASH_SEED)
        if seed != HASH_SEED:
            problem = f"is {seed!r} for {role.role}, and every engine of a job gets {HASH_SEED!r}"
            yield error(env_field(given.spec, role.role, "PYTHONHASHSEED"), problem, "drop it")


def prefix_caching_on(given: CheckInput) -> Iterator[Finding]:
    for role in given.roles:
        if role.engine.get("enable_prefix_caching") is False:
            field = engine_field(given.spec, role.role, "enable_prefix_caching")
            yield error(field, "is false, and blocks are shared by their hash", "leave prefix caching on")


def block_size_of_platform(given: CheckInput) -> Iterator[Finding]:
    for role in given.roles:
        size = role.engine.get("block_size")
        if given.abilities.platform == "cpu" and isinstance(size, int) and size % CPU_BLOCK_MULTIPLE:
            field = engine_field(given.spec, role.role, "block_size")
            yield error(field, f"is {size}", f"CPU attention needs a multiple of {CPU_BLOCK_MULTIPLE}")


RULES = (shared_layout, handed_layout, one_hash_seed, prefix_caching_on, block_size_of_platform)
