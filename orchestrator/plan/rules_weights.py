"""Rules on `[weights]`: what the plug-in would refuse in a running engine is refused before one starts.

The other end is `rank_of_engine` in connectors/vllm_plugin/weights/rank.py, which looks again.
"""

from __future__ import annotations

from collections.abc import Iterator

from connectors.engine_argv import WEIGHT_ARGUMENTS
from orchestrator.plan.resolve import RoleConfig, engine_field
from orchestrator.plan.rules_base import CheckInput, error, warning
from orchestrator.plan.types import Finding
from orchestrator.spec.weights import WeightsSpec

WITHOUT = "drop [weights]: engines then keep the weights that they start with"


def weights_can_be_replaced(given: CheckInput) -> Iterator[Finding]:
    weights, abilities = given.spec.weights, given.abilities
    if weights is None or given.facts.abilities is None:
        return
    if not abilities.weight_transfer:
        problem = f"vLLM {abilities.vllm_version} ({abilities.python}) cannot replace weights in place"
        yield error("weights", problem, f"install vLLM 0.25.1 or newer there, or {WITHOUT}")
    library, version = {
        "nixl": ("nixl", abilities.nixl_version),
        "store": ("mooncake-transfer-engine", abilities.mooncake_version),
        "path": ("", ""),
    }[weights.transport]
    if version is None:
        problem = f"is {weights.transport!r}, and {abilities.python} has no {library}"
        yield error("weights.transport", problem, 'install it there, or set weights.transport = "path"')


def engines_take_weights(given: CheckInput) -> Iterator[Finding]:
    """[A40] A rank that raises at its start or in a load costs the whole engine."""
    if given.spec.weights is None:
        return
    for role in given.roles:
        yield from _owned(given, role)
        yield from _refused(given, role)
        yield from _quantized(given, role, given.spec.weights)


def _owned(given: CheckInput, role: RoleConfig) -> Iterator[Finding]:
    for name in WEIGHT_ARGUMENTS:
        if role.engine.get(name) is not None:
            yield error(engine_field(given.spec, role.role, name), "is decided by [weights]", f"drop it, or {WITHOUT}")


def _refused(given: CheckInput, role: RoleConfig) -> Iterator[Finding]:
    """Where one answer would not be that of every rank, or weights would stay that no version names."""
    if role.engine.get("enable_lora"):
        problem = "is set, and an adapter is a change of weights that no version names"
        yield error(engine_field(given.spec, role.role, "enable_lora"), problem, f"drop it, or {WITHOUT}")
    for name, size in (
        ("data_parallel_size", role.sizes.data),
        ("prefill_context_parallel_size", role.sizes.prefill_context),
    ):
        if size > 1:
            problem = f"is {size}; weights are replaced in engines with tensor and pipeline parallelism"
            mend = "use more replicas" if name == "data_parallel_size" else "set it to 1"
            yield error(engine_field(given.spec, role.role, name), problem, f"{mend}, or {WITHOUT}")


def _quantized(given: CheckInput, role: RoleConfig, weights: WeightsSpec) -> Iterator[Finding]:
    method = role.engine.get("quantization") or given.facts.model.quantization
    if method and weights.load_mode == "gpu_fetch":
        problem = f'is "gpu_fetch", which fills parameters with what the trainer sends; these are quantised ({method})'
        yield error("weights.load_mode", problem, 'set it to "cpu_prefetch"')


def rolling_leaves_a_pair(given: CheckInput) -> Iterator[Finding]:
    """Pushes that name no strategy would all be refused."""
    if given.spec.weights is None or given.spec.weights.strategy != "rolling":
        return
    single = " and ".join(role.role for role in given.roles if role.replicas == 1)
    if single:
        problem = f'is "rolling", and {single} has one replica: nobody would serve while it loads'
        yield warning("weights.strategy", problem, 'set it to "barrier", or give each role a second replica')


def pool_keys_carry_epochs(given: CheckInput) -> Iterator[Finding]:
    """[A24] Where they do not, one wipe clears the whole pool: no engine may be using it then, and no other job."""
    if given.spec.weights is None:
        return
    for role in given.pooled:
        if role.config.transfer_override is None:
            continue
        field = engine_field(given.spec, role.config.role, "kv_transfer_config")
        problem = "has a store connector whose keys carry no epoch"
        if given.spec.weights.strategy == "rolling":
            mend = f'set it to "barrier", or drop {field}'
            yield error("weights.strategy", f'is "rolling", and {field} {problem}', mend)
        if given.spec.pool.master is not None:
            mend = f"let the job start a master of its own (drop pool.master), or drop {field}"
            yield error("pool.master", f"is joined, {field} {problem}, and an update wipes all that the pool has", mend)
        yield warning(field, f"{problem}, so each update wipes the pool", "drop it to let Headrace compose the chain")


RULES = (weights_can_be_replaced, engines_take_weights, rolling_leaves_a_pair, pool_keys_carry_epochs)
