"""Rules on the engines: what is installed, what it can do, and what of it the plan decides."""

from __future__ import annotations

from collections.abc import Iterator

from connectors.chain import connectors_named
from connectors.engine_argv import OWNED_ARGUMENTS
from connectors.engine_env import OWNED_ENVIRONMENT
from orchestrator.plan.resolve import engine_field, env_field
from orchestrator.plan.rules_base import CheckInput, error, offload_field, warning
from orchestrator.plan.types import Finding


def engine_installed(given: CheckInput) -> Iterator[Finding]:
    if given.facts.abilities is None:
        mend = "install the engine stack there (make stack, or headrace[gpu]), or set launch.python"
        yield error("launch.python", given.facts.engine_missing, mend)
        return
    python = given.abilities.python
    starts_master = given.pooled and given.spec.pool.master is None
    if starts_master and given.abilities.mooncake_master is None:
        yield error("launch.python", f"{python} has no mooncake_master", "install mooncake-transfer-engine there")
    if given.pooled and given.abilities.mooncake_client is None:
        yield error("launch.python", f"{python} has no mooncake_client", "install mooncake-transfer-engine there")
    if given.split and given.abilities.nixl_version is None:
        yield error("launch.python", f"{python} has no NIXL", "install nixl there")


def model_exists(given: CheckInput) -> Iterator[Finding]:
    path = given.spec.model.path
    if path.startswith(("/", ".", "~")) and not given.facts.model.is_folder:
        mend = "give the folder of a checkpoint that every node can read"
        yield error("model.path", f"there is no folder {path}", mend)


def roles_make_a_fleet(given: CheckInput) -> Iterator[Finding]:
    names = {role.role for role in given.roles}
    if not names:
        yield error("roles", "no role is given", "add [roles.prefill] and [roles.decode], or [roles.colocated]")
    elif "colocated" in names and len(names) > 1:
        problem = f"{' and '.join(sorted(names))} are mixed"
        yield error("roles", problem, "use prefill and decode, or colocated alone")
    elif len(names) == 1 and "colocated" not in names:
        other = "decode" if names == {"prefill"} else "prefill"
        yield error(f"roles.{other}", "is missing", f"a prefill/decode fleet needs both; add [roles.{other}]")


def owned_arguments(given: CheckInput) -> Iterator[Finding]:
    """[A29] What the plan decides cannot be set a second time, nor under another spelling."""
    for role in given.roles:
        for name in role.engine:
            field = engine_field(given.spec, role.role, name)
            known = name.replace("-", "_")
            if known in OWNED_ARGUMENTS:
                yield error(field, "is decided by the plan", OWNED_ARGUMENTS[known])
            elif known.startswith("no_"):
                yield error(field, "is vLLM's spelling of a switch", f"write {known.removeprefix('no_')} = false")
            elif "-" in name:
                yield error(field, "has dashes; names stand here with underscores", f"write {known}")


def owned_environment(given: CheckInput) -> Iterator[Finding]:
    """[A23, A29] The same for the environment."""
    for role in given.roles:
        for name in role.env:
            if name in OWNED_ENVIRONMENT:
                problem = f"is {role.env[name]!r}, and the plan decides it"
                yield error(env_field(given.spec, role.role, name), problem, f"drop it: {OWNED_ENVIRONMENT[name]}")


def engine_can(given: CheckInput) -> Iterator[Finding]:
    """What the installed vLLM cannot do is refused by name."""
    abilities = given.abilities
    version = f"vLLM {abilities.vllm_version} ({abilities.python})"
    for role in given.pooled:
        if role.name != "prefill" and role.offload.save_decode_cache and not abilities.save_decode_cache:
            field = offload_field(given, role.config, "save_decode_cache")
            problem = f"is true, and the MooncakeStoreConnector of {version} has no save_decode_cache"
            mend = "set it to false (the next turn then recomputes what was generated), or install vLLM 0.32"
            yield error(field, problem, mend)
    if not abilities.scale_out_flag:
        yield warning("launch.python", f"{version} has no --enable-scale-out", "/inference/v1/generate may be missing")
    if given.split and not abilities.handoff_lease:
        problem = f"is {given.spec.handoff.lease:g} s, and {version} does not read kv_lease_duration"
        yield warning("handoff.lease", problem, "set it to no more than that version's own lease")


def explicit_transfer_config(given: CheckInput) -> Iterator[Finding]:
    for role in given.roles:
        if role.transfer_override is None:
            continue
        names = connectors_named(role.transfer_override)
        field = engine_field(given.spec, role.role, "kv_transfer_config")
        problem = f"replaces the composed chain of {role.role} by {', '.join(names) or 'no connector'}"
        yield warning(field, problem, "drop it to let Headrace compose the chain")
        if role.transfer_override.get("kv_load_failure_policy") is None and given.abilities.load_failure_policy:
            problem = "does not state kv_load_failure_policy; vLLM's default fails a request whose block was evicted"
            yield warning(field, problem, 'add kv_load_failure_policy = "recompute"')


def later_versions(given: CheckInput) -> Iterator[Finding]:
    if given.spec.weights is not None:
        problem = "in-place weight updates are not driven by this version"
        yield warning("weights", problem, "the section is checked, then unused")


RULES = (
    engine_installed,
    model_exists,
    roles_make_a_fleet,
    owned_arguments,
    owned_environment,
    engine_can,
    explicit_transfer_config,
    later_versions,
)
