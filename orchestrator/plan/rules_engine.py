"""Rules on the engines: what is installed, what it can do, and what of it the plan decides."""

from __future__ import annotations

from collections.abc import Iterator

from connectors import nixl
from connectors.chain import ChainReading
from connectors.engine_argv import OWNED_ARGUMENTS, abbreviated
from connectors.engine_env import OWNED_ENVIRONMENT
from orchestrator.plan.resolve import RoleConfig, engine_field, env_field
from orchestrator.plan.rules_base import CheckInput, error, offload_field, warning
from orchestrator.plan.types import Finding
from orchestrator.spec.offload import MooncakeOffload
from orchestrator.spec.secrets import is_secret, without_secrets


def engine_installed(given: CheckInput) -> Iterator[Finding]:
    if given.facts.abilities is None:
        mend = "install the engine stack there (`headrace doctor` says how), or set launch.python"
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


def engine_fenced(given: CheckInput) -> Iterator[Finding]:
    """[A41] An engine without its fence serves whoever reaches its port, under whatever epoch."""
    python, version = given.abilities.python, given.abilities.vllm_version
    if not given.abilities.middleware_flag:
        problem = f"vLLM {version} ({python}) has no --middleware, so its engines cannot load their fence"
        yield error("launch.python", problem, "install vLLM 0.25.1 or newer there")
    if given.abilities.plugin_path is None:
        problem = f"{python} has no connectors.vllm_plugin of this version, so its engines cannot load their fence"
        mend = f"install this version of Headrace there: {python} -m pip install --no-deps headrace"
        yield error("launch.python", problem, mend)


def model_exists(given: CheckInput) -> Iterator[Finding]:
    path = given.spec.model.path
    if path.startswith(("/", ".", "~")) and not given.facts.model.is_folder:
        mend = "give the folder of a checkpoint that every node can read"
        if not path.startswith(("/", "~")):
            mend += ", seen from where headrace was started, or as absolute path"
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
            elif whole := abbreviated(name):
                yield error(field, f"is a beginning of {whole}, which vLLM takes for it", "write the whole name")


def no_secret_arguments(given: CheckInput) -> Iterator[Finding]:
    """A command line can be read by every user of the machine."""
    for role in given.roles:
        for name, value in role.engine.items():
            if isinstance(value, str) and is_secret(name) and name not in OWNED_ARGUMENTS:
                mend = f"set {name.upper()} in env, or drop it"
                yield error(engine_field(given.spec, role.role, name), "would stand on the engine's command line", mend)


def owned_environment(given: CheckInput) -> Iterator[Finding]:
    """[A23, A29] The same for the environment."""
    for role in given.roles:
        for name in role.env:
            if name in OWNED_ENVIRONMENT:
                problem = f"is {without_secrets(role.env[name], name)!r}, and the plan decides it"
                yield error(env_field(given.spec, role.role, name), problem, f"drop it: {OWNED_ENVIRONMENT[name]}")


def engine_can(given: CheckInput) -> Iterator[Finding]:
    """What the installed vLLM cannot do is refused by name."""
    abilities = given.abilities
    version = f"vLLM {abilities.vllm_version} ({abilities.python})"
    for role in given.pooled:
        composed = role.config.transfer_override is None
        if composed and role.name != "prefill" and role.offload.save_decode_cache and not abilities.save_decode_cache:
            field = offload_field(given, role.config, "save_decode_cache")
            problem = f"is true, and the MooncakeStoreConnector of {version} has no save_decode_cache"
            mend = "set it to false (the next turn then recomputes what was generated), or install vLLM 0.32"
            yield error(field, problem, mend)
    if not abilities.scale_out_flag:
        yield warning("launch.python", f"{version} has no --enable-scale-out", "/inference/v1/generate may be missing")


def token_route_open(given: CheckInput) -> Iterator[Finding]:
    """[A42] The router serves the token route, and engines answer it with 403 unless told otherwise."""
    for role in given.roles:
        if role.engine.get("enable_scale_out") is False:
            field = engine_field(given.spec, role.role, "enable_scale_out")
            problem = "is false: without --enable-scale-out /inference/v1/generate answers 403"
            yield error(field, problem, "drop it")


def one_handoff_lease(given: CheckInput) -> Iterator[Finding]:
    """[A39] A handoff that the router believes in longer than the engine keeps it is read wrong, without an error."""
    promised, abilities = int(given.spec.handoff.lease), given.abilities
    if given.split and not abilities.handoff_lease:
        if promised != nixl.DEFAULT_LEASE_S:
            version = f"vLLM {abilities.vllm_version} ({abilities.python})"
            problem = f"is {promised} s, and {version} keeps a handoff for {nixl.DEFAULT_LEASE_S} s whatever it is told"
            yield error("handoff.lease", problem, f'set it to "{nixl.DEFAULT_LEASE_S}s"')
        return
    for role in given.split:
        reading = role.reading
        if reading is not None and reading.has_handoff and reading.lease != promised:
            field = engine_field(given.spec, role.role, "kv_transfer_config")
            problem = f"{_said_lease(reading)}, and the router goes by handoff.lease, which is {promised} s"
            mend = f"set kv_lease_duration = {promised} in NixlConnector's kv_connector_extra_config"
            if isinstance(reading.lease, int) and not isinstance(reading.lease, bool):
                mend = f'set handoff.lease = "{reading.lease}s", or {mend}'
            yield error(field, problem, mend)


def _said_lease(reading: ChainReading) -> str:
    if reading.lease_named:
        return f"has kv_lease_duration {reading.lease!r}"
    return f"has no kv_lease_duration, so vLLM's default of {reading.lease} s rules"


def explicit_transfer_config(given: CheckInput) -> Iterator[Finding]:
    for role in given.roles:
        reading = role.reading
        if role.transfer_override is None or reading is None:
            continue
        field = engine_field(given.spec, role.role, "kv_transfer_config")
        problem = f"replaces the composed chain of {role.role} by {', '.join(reading.connectors) or 'no connector'}"
        problem += _consequence(given, role, reading)
        yield warning(field, problem, "drop it to let Headrace compose the chain")
        if reading.joins_pool and not isinstance(role.offload, MooncakeOffload):
            problem = f"joins a pool, and kv_offload of {role.role} names none"
            yield error(field, problem, 'set kv_offload.type = "mooncake" for the role, or drop that connector')
        if role.transfer_override.get("kv_load_failure_policy") is None and given.abilities.load_failure_policy:
            problem = "does not state kv_load_failure_policy; vLLM's default fails a request whose block was evicted"
            yield warning(field, problem, 'add kv_load_failure_policy = "recompute"')


def _consequence(given: CheckInput, role: RoleConfig, reading: ChainReading) -> str:
    """What a role that its block or the fleet asks for then lacks."""
    lacks = [] if reading.joins_pool or given.spec.kv_offload == "none" else ["the pool"]
    lacks += ["a handoff"] if role.role != "colocated" and not reading.has_handoff else []
    return f"; {role.role} then has no part in {' nor '.join(lacks)}" if lacks else ""


def launched_here(given: CheckInput) -> Iterator[Finding]:
    if given.spec.launch.backend not in given.facts.backends:
        nodes = len(given.facts.nodes)
        own = "this machine's one node" if nodes == 1 else f"{nodes} nodes"
        problem = f"planned for {own}; {given.spec.launch.backend} is not launched by this version"
        yield warning("launch.backend", problem, f'set launch.backend = "{given.facts.backends[0]}" to start it here')


RULES = (
    engine_installed,
    engine_fenced,
    model_exists,
    roles_make_a_fleet,
    owned_arguments,
    no_secret_arguments,
    owned_environment,
    engine_can,
    token_route_open,
    one_handoff_lease,
    explicit_transfer_config,
    launched_here,
)
