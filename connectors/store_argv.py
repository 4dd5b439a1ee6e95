"""Command lines of the pool's own processes: one master, and a storage client on every node that lends capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from connectors.mooncake import METADATA_SERVER, TCP_ENVIRONMENT, Protocol, transfer_port_environment

CAPACITY_METRIC = "master_total_capacity_bytes"
"""The master's own word on how much DRAM is mounted."""
USED_METRIC = "master_allocated_bytes"
KEYS_METRIC = "master_key_count"

SEGMENT_METRIC = "segment_total_capacity_bytes"
"""The same per storage client; its label `segment` has the host and the name port of the client."""

CLIENT_TTL_S = 30
"""Silence after which a storage client counts as dead and its memory as gone. Mooncake's 10 s was seen to drop a
living client of an overloaded machine, and the whole pool with it."""

OWNED_MASTER_FLAGS: Mapping[str, str] = {
    "rpc_port": "ports are planned; set ports.base",
    "port": "ports are planned; set ports.base",
    "rpc_address": "bind addresses are planned",
    "metrics_port": "ports are planned; set ports.base",
    "metrics_host": "bind addresses are planned",
    "default_kv_lease_ttl": "set pool.lease_ttl",
    "enable_offload": "set kv_offload.disk.path",
}

FORBIDDEN_WITH_DISK_TIER: Mapping[str, str] = {
    "root_fs_dir": "Mooncake's SSD guide forbids root_fs_dir together with enable_offload",
    "enable_ha": "the disk tier's metadata is not replicated to standby masters",
}


@dataclass(frozen=True, kw_only=True)
class MasterSettings:
    program: str
    bind_host: str
    rpc_port: int
    metrics_port: int
    lease_ttl_s: float
    disk_tier: bool
    extra_flags: Mapping[str, str | int | float | bool]


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    program: str
    host: str
    """Advertised to peers as this client's address."""
    port: int
    transfer_ports: tuple[int, int]
    """(first, count) of the ports that it picks itself."""
    master_address: str
    protocol: Protocol
    device_names: tuple[str, ...]
    segment_bytes: int
    disk_path: str | None
    disk_bytes: int | None


def master_argv(settings: MasterSettings) -> tuple[str, ...]:
    """mooncake_master, lease in milliseconds (A22), every port given (A29)."""
    flags: dict[str, str | int | float | bool] = {
        "client_ttl": CLIENT_TTL_S,
        **{flag_name(name): value for name, value in settings.extra_flags.items()},
        "rpc_address": settings.bind_host,
        "rpc_port": settings.rpc_port,
        "metrics_host": settings.bind_host,
        "metrics_port": settings.metrics_port,
        "default_kv_lease_ttl": round(settings.lease_ttl_s * 1000),
    }
    if settings.disk_tier:
        flags["enable_offload"] = True
    return (settings.program, *(f"--{name}={_text(flags[name])}" for name in sorted(flags)))


def client_argv(settings: ClientSettings) -> tuple[str, ...]:
    """mooncake_client with all of a node's capacity."""
    flags: dict[str, str | int | bool] = {
        "host": settings.host,
        "port": settings.port,
        "master_server_address": settings.master_address,
        "metadata_server": METADATA_SERVER,
        "protocol": settings.protocol,
        "global_segment_size": settings.segment_bytes,
    }
    if settings.device_names:
        flags["device_names"] = ",".join(settings.device_names)
    if settings.disk_path is not None:
        flags["enable_offload"] = True
    return (settings.program, *(f"--{name}={_text(flags[name])}" for name in sorted(flags)))


def client_environment(settings: ClientSettings) -> dict[str, str]:
    """Disk tier and ports have no flags; Mooncake reads them from the environment."""
    env = transfer_port_environment(*settings.transfer_ports)
    if settings.protocol == "tcp":
        env |= TCP_ENVIRONMENT
    if settings.disk_path is not None:
        env["MOONCAKE_OFFLOAD_FSDIR"] = settings.disk_path
        env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = settings.disk_path
        env["MOONCAKE_OFFLOAD_ENABLE_EVICTION"] = "true"
        if settings.disk_bytes is not None:
            env["MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"] = str(settings.disk_bytes)
    return env


def flag_name(name: str) -> str:
    """gflags reads dashes as underscores."""
    return name.replace("-", "_")


def _text(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
