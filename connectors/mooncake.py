"""MooncakeStoreConnector: the shared pool seen from inside an engine.

`chain.py` puts its entry after NIXL's; `store_argv.py` starts the pool's own processes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from connectors.types import JsonDict

Protocol = Literal["tcp", "rdma"]

TCP_ENVIRONMENT = {
    "MC_TCP_SLICE_SIZE": "4194304",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "8",
}
"""Larger slices over kept connections in several lanes: doubled the load rate of the tcp transport."""

METADATA_SERVER = "P2PHANDSHAKE"
"""Mooncake's peers exchange their metadata themselves: one server and one port less."""

EPHEMERAL_PORTS_FROM = 32768
"""Mooncake ignores a port range that reaches into the kernel's ephemeral range, with a warning in its log only."""

TRANSFER_PORTS_PER_CLIENT = 6
"""A store client takes one name and two listening ports from its ranges; the rest is slack for its random choice."""


STORE = "MooncakeStoreConnector"
EPOCH_STORE_MODULE = "connectors.vllm_plugin.epoch_store"
"""Has a class of the same name, whose keys follow the epoch."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    cache_prefix: str
    save_decode_cache: bool
    cross_layers_blocks: bool
    by_epoch: bool
    """Whether weights change while the engine runs: each epoch's KV then has keys of its own."""


def connector_entry(settings: StoreSettings) -> JsonDict:
    """The child entry for `MultiConnector`, or the whole config's core where the store stands alone.

    kv_both on every role: prefill loads and saves, decode saves what it generated and may load.
    """
    extra: JsonDict = {"cache_prefix": settings.cache_prefix, "load_async": True}
    if settings.save_decode_cache:
        extra["save_decode_cache"] = True
    if settings.cross_layers_blocks:
        extra["enable_cross_layers_blocks"] = "True"
    entry: JsonDict = {"kv_connector": STORE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if settings.by_epoch:
        entry["kv_connector_module_path"] = EPOCH_STORE_MODULE
    return entry


def client_config(
    *, master_address: str, protocol: Protocol, device_names: tuple[str, ...], local_buffer_bytes: int, disk_tier: bool
) -> str:
    """Text of the file that MOONCAKE_CONFIG_PATH names: engines lend no memory, storage clients own all of it."""
    config = {
        "mode": "standalone-store",
        "metadata_server": METADATA_SERVER,
        "master_server_address": master_address,
        "global_segment_size": 0,
        "local_buffer_size": local_buffer_bytes,
        "protocol": protocol,
        "device_name": ",".join(device_names),
        "enable_offload": disk_tier,
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def transfer_port_environment(first: int, count: int) -> dict[str, str]:
    """Environment that keeps store clients' own ports inside `first .. first + count - 1`."""
    names, listens = transfer_port_ranges(first, count)
    return {
        "MC_STORE_CLIENT_MIN_PORT": str(names.first),
        "MC_STORE_CLIENT_MAX_PORT": str(names.first + names.count - 1),
        "MC_MIN_RPC_PORT": str(listens.first),
        "MC_MAX_RPC_PORT": str(listens.first + listens.count - 1),
    }


@dataclass(frozen=True, kw_only=True)
class TransferPorts:
    """One of a store client's two ranges."""

    name: str
    first: int
    count: int
    needed: int
    """Ports that the clients which share the range take."""


def transfer_port_ranges(first: int, count: int) -> tuple[TransferPorts, TransferPorts]:
    """The lower third names the clients, the rest listens. A range's two ends must differ, or Mooncake ignores it."""
    names, clients = max(2, count // 3), count // TRANSFER_PORTS_PER_CLIENT
    return (
        TransferPorts(name="store client names", first=first, count=names, needed=clients),
        TransferPorts(name="store transfers", first=first + names, count=count - names, needed=2 * clients),
    )


def derive_cache_prefix(job: str, identity: JsonDict) -> str:
    """A key prefix of the job's own: pool keys carry only the last part of the model's path, so everything that makes
    KV incompatible (path, revision, weights on disk, dtypes, block size, parallel sizes) is hashed into it."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return f"{job}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
