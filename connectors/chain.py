"""The chain of one role: its connectors in order, as one `--kv-transfer-config`.

Prefill and decode get NIXL first and the pool second: `MultiConnector` loads from the first child that offers tokens,
so a handoff wins over a pool read, and saves to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors import mooncake, nixl, offload
from connectors.types import EngineAbilities, JsonDict, Role

LOAD_FAILURE_POLICY = "recompute"
"""A block that was evicted between look-up and read is computed again; vLLM's default fails the request (A22)."""


@dataclass(frozen=True, kw_only=True)
class NativeTier:
    cpu_bytes: int
    disk_path: str | None


@dataclass(frozen=True, kw_only=True)
class ChainParts:
    """What a role's chain is made of; an absent part is None."""

    handoff: nixl.NixlSettings | None
    store: mooncake.StoreSettings | None
    native: NativeTier | None


def transfer_config(role: Role, parts: ChainParts, abilities: EngineAbilities) -> JsonDict | None:
    """The role's kv_transfer_config, or None where an engine has no connector at all."""
    entries: list[JsonDict] = []
    if parts.handoff is not None:
        entries.append(nixl.connector_entry(role, parts.handoff, abilities))
    if parts.store is not None:
        entries.append(mooncake.connector_entry(parts.store))
    if parts.native is not None:
        entries.append(offload.connector_entry(parts.native.cpu_bytes, parts.native.disk_path))
    if not entries:
        return None
    config: JsonDict
    if len(entries) == 1:
        config = dict(entries[0])
    else:
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": entries},
        }
    if abilities.load_failure_policy:
        config["kv_load_failure_policy"] = LOAD_FAILURE_POLICY
    return config


def connectors_named(config: JsonDict) -> tuple[str, ...]:
    """Names of the connectors in a kv_transfer_config, in order; children instead of `MultiConnector`."""
    children = config.get("kv_connector_extra_config", {}).get("connectors")
    if config.get("kv_connector") == "MultiConnector" and isinstance(children, list):
        return tuple(str(child.get("kv_connector")) for child in children if isinstance(child, dict))
    return (str(config["kv_connector"]),) if config.get("kv_connector") else ()
