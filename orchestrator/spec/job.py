"""The job file: what a user asks for. `load.py` reads it; `orchestrator/plan` turns it into a plan.

Every default of a job lives here, once; those of the router stand in its settings. Validators check and do not
rewrite: filling in is the planner's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ByteSize, Field

from connectors.mooncake import EPHEMERAL_PORTS_FROM
from orchestrator.spec.base import SpecModel
from orchestrator.spec.quantity import Host, Port, PositiveBytes, Seconds
from orchestrator.spec.weights import WeightsSpec
from router.settings import PolicySettings, RouterSettings, StickyLeastLoaded

JobName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
RoleName = Literal["prefill", "decode", "colocated"]
FlagValue = str | int | float | bool


def _table_or(*words: str) -> Callable[[object], object]:
    """A check with one message, where a union would give one per alternative."""

    def check(value: object) -> object:
        if isinstance(value, dict) or value in words:
            return value
        raise ValueError(f"must be a table or {' or '.join(map(repr, words))}")

    return check


ROUTER_DEFAULTS = RouterSettings.model_fields
_POLICIES = tuple(
    get_args(policy.model_fields["type"].annotation)[0] for policy in get_args(get_args(PolicySettings)[0])
)


def _policy_name(value: object) -> object:
    if value in _POLICIES:
        return value
    raise ValueError(f"must be {' or '.join(map(repr, _POLICIES))}")


def _flag_value(value: object) -> object:
    if isinstance(value, FlagValue):
        return value
    raise ValueError("must be a string, a number or a boolean")


def _host_and_port(value: object) -> object:
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        if host and not set(host) & set(":/ ") and port.isascii() and port.isdecimal() and 0 < int(port) < 65536:
            return value
    raise ValueError("must be host:port, with a port from 1 to 65535")


def _variable_name(value: object) -> object:
    if isinstance(value, str) and value and "=" not in value:
        return value
    raise ValueError("must be the name of a variable: not empty, without '='")


Environment = dict[Annotated[str, BeforeValidator(_variable_name)], str]


class ModelSpec(SpecModel):
    path: Annotated[str, Field(min_length=1)]
    """What vLLM gets as --model: a folder, or a name that the engine's own cache can resolve."""
    served_names: tuple[str, ...] = ()
    """Names that clients may use; the path when empty."""
    revision: str | None = None


class RoleSpec(SpecModel):
    replicas: Annotated[int, Field(ge=1)] = 1
    """Engines of this role."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """vLLM arguments of this role; stronger than the job's."""
    kv_offload: Annotated[
        dict[str, Any] | Literal["inherit", "none"], BeforeValidator(_table_or("inherit", "none"))
    ] = "inherit"
    """"inherit", "none", or a block that changes what it names of the job's block."""
    env: Environment = Field(default_factory=dict)
    """Environment of this role's engines; stronger than the job's."""


class RolesSpec(SpecModel):
    prefill: RoleSpec | None = None
    decode: RoleSpec | None = None
    colocated: RoleSpec | None = None
    """Ordinary engines that do both; not together with prefill and decode."""


class PoolSpec(SpecModel):
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_names: tuple[str, ...] = ()
    """RDMA devices; all that Mooncake finds when empty."""
    lease_ttl: Seconds = 60.0
    """How long a block that was looked up cannot be evicted. Seconds to minutes."""
    master: Annotated[str, BeforeValidator(_host_and_port)] | None = None
    """"host:port" of a running master to join instead of starting one."""
    local_buffer_bytes: PositiveBytes = ByteSize(1 << 30)
    """Staging buffer of the store client inside each engine rank."""
    cache_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    """Prefix of all pool keys of the job: at most 64 letters, digits, dots, dashes and underscores; derived from job,
    model and KV layout when left out."""
    master_flags: dict[str, Annotated[FlagValue, BeforeValidator(_flag_value)]] = Field(default_factory=dict)
    """Further flags of mooncake_master under its own names."""


class TrainerStorageSpec(SpecModel):
    num_bytes: PositiveBytes
    """DRAM that each trainer node lends to the pool."""
    nodes: tuple[str, ...] = ()
    """Trainer nodes; the first node of the job when empty."""


class RouterSpec(SpecModel):
    port: Port = 8000
    host: Host | None = None
    """Address to listen on: loopback on a one-node job, every interface otherwise, when left out."""
    policy: Annotated[str, BeforeValidator(_policy_name)] = ROUTER_DEFAULTS["policy"].default.type
    session_idle: Seconds = StickyLeastLoaded().session_idle_s
    """A session without an open request is forgotten after this."""
    request_timeout: Seconds = ROUTER_DEFAULTS["request_timeout_s"].default
    """For a whole request: all legs and attempts. 504 after it."""
    silence_limit: Seconds = ROUTER_DEFAULTS["silence_limit_s"].default
    """An engine that for so long has neither answered a health probe nor sent a byte for any request hangs: its
    requests are run elsewhere. Compiling may silence a good one for nearly two minutes."""
    leg_timeout: Seconds | None = ROUTER_DEFAULTS["leg_timeout_s"].default
    """How long one engine, its queue included, may take to the first byte of its reply, or to the whole of one that is
    not streamed; then the request is run elsewhere. As long as request_timeout when left out."""
    retries: Annotated[int, Field(ge=0, le=10)] = ROUTER_DEFAULTS["retries"].default
    workers: Annotated[int, Field(ge=1, le=64)] = ROUTER_DEFAULTS["workers"].default
    """Processes that serve the router's port."""
    max_requests: Annotated[int, Field(ge=1)] | None = ROUTER_DEFAULTS["max_requests"].default
    """Requests at engines at a time; further ones wait in line. Any number when left out."""
    max_requests_per_replica: Annotated[int, Field(ge=1)] | None = ROUTER_DEFAULTS["max_legs_per_replica"].default
    max_waiting: Annotated[int, Field(ge=0)] = ROUTER_DEFAULTS["max_waiting"].default
    """Length of the line."""
    max_wait: Seconds = ROUTER_DEFAULTS["max_wait_s"].default
    """How long a request may wait in line."""
    max_body_bytes: PositiveBytes = ROUTER_DEFAULTS["max_body_bytes"].default
    """Of one request. All others wait while a body is read and split: about 1 ms per MiB."""
    skip_prefill_below_tokens: Annotated[int, Field(ge=0)] = ROUTER_DEFAULTS["skip_prefill_below_tokens"].default
    """A follow-up with fewer new tokens goes straight to the decode replica that has the rest; 0: never."""


class HandoffSpec(SpecModel):
    """The one-sided read of a prompt's KV from prefill to decode, by NIXL."""

    lease: Annotated[Seconds, Field(ge=6)] = 30.0
    """How long a prefill engine keeps a handoff that was not fetched. vLLM counts whole seconds and sends heartbeats
    every sixth of it, so 6 seconds is the least."""
    transport: Literal["auto", "tcp", "rdma"] = "auto"
    """How prefill and decode reach each other between nodes. "auto": RDMA where pool.protocol is "rdma", otherwise what
    UCX finds best."""
    num_threads: Annotated[int, Field(ge=1, le=64)] = 1
    """UCX worker threads of each engine rank. Each takes network resources of its own."""
    nvlink: bool | None = None
    """Whether GPUs of one node see each other by NVLink. Where they do not, UCX reads a peer's memory by TCP unless
    told otherwise; asked of the machine when left out."""


class LaunchSpec(SpecModel):
    backend: Literal["local", "slurm"] = "local"
    python: Annotated[str, Field(pattern="^/")] | None = None
    """Absolute path of the interpreter that has vLLM, NIXL and Mooncake; the one that runs Headrace when left out."""
    share_gpus: bool = False
    """Let replicas share GPUs when there are too few (for trials on a small machine)."""
    ready_timeout: Seconds = 900.0
    """How long one engine may take to serve."""
    stop_grace: Seconds = 5.0
    """Seconds between SIGTERM and SIGKILL."""


class PortsSpec(SpecModel):
    base: Annotated[int, Field(ge=1024, lt=EPHEMERAL_PORTS_FROM)] | None = None
    """First port of the job's block, below the kernel's ephemeral range; derived from the job's name when left out."""


class MonitoringSpec(SpecModel):
    enabled: bool = True
    scrape_interval: Annotated[Seconds, Field(ge=1)] = 5.0
    """At least 1 second."""
    retention: Annotated[str, Field(pattern=r"^[1-9][0-9]*(m|h|d|w|y)$")] = "7d"
    """How long Prometheus keeps what it scraped: a number with m, h, d, w or y."""


class ChecksSpec(SpecModel):
    """What is asked of the running engines before the gate opens."""

    offload_probe: Literal["fail", "warn", "off"] = "warn"
    """Whether a pool that never answers ends the job, is reported, or is not looked at."""


class AuditSpec(SpecModel):
    """Which finished requests are kept, so that an audit can replay them."""

    share: Annotated[float, Field(ge=0, le=1)] = ROUTER_DEFAULTS["audit_share"].default
    """Of the requests whose clients ask for token ids and log-probabilities; 0: none."""
    kept: Annotated[int, Field(ge=1, le=1024)] = ROUTER_DEFAULTS["audit_kept"].default
    """So many in each router worker, the newest; up to 8 MiB each."""
    every: Annotated[Seconds, Field(ge=1)] | None = None
    """How often `headrace serve` replays the newest of them, if there is one that it has not. Never when left out."""


class JobSpec(SpecModel):
    """The root of a job file."""

    name: JobName
    """Lower-case letters, digits and dashes, at most 63 characters."""
    model: ModelSpec
    engine: dict[str, Any] = Field(default_factory=dict)
    """vLLM arguments under vLLM's own names, with underscores; unknown ones pass through. Write paths among them
    absolute: engines run in the job's folder."""
    env: Environment = Field(default_factory=dict)
    """Environment of all engines."""
    kv_offload: Annotated[dict[str, Any] | Literal["none"], BeforeValidator(_table_or("none"))] = "none"
    """What roles inherit; see `offload.py`."""
    roles: RolesSpec
    pool: PoolSpec = PoolSpec()
    trainer_storage: TrainerStorageSpec | None = None
    handoff: HandoffSpec = HandoffSpec()
    router: RouterSpec = RouterSpec()
    weights: WeightsSpec | None = None
    """See `weights.py`."""
    launch: LaunchSpec = LaunchSpec()
    ports: PortsSpec = PortsSpec()
    monitoring: MonitoringSpec = MonitoringSpec()
    checks: ChecksSpec = ChecksSpec()
    audit: AuditSpec = AuditSpec()
