"""The chain of one role: its connectors in order, as one `--kv-transfer-config`.

Prefill and decode get NIXL first and the pool second: `MultiConnector` loads from the first child that offers tokens,
so a handoff wins over a pool read, and saves to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors import mooncake, nixl, offload
from connectors.types import EngineAbilities, JsonDict, Role

LEASE_KEY = "kv_lease_duration"
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


@dataclass(frozen=True, kw_only=True)
class ChainReading:
    """What a kv_transfer_config of the user's makes an engine do."""

    connectors: tuple[str, ...]
    """Names, in order; the children instead of `MultiConnector`."""
    lease: object
    """kv_lease_duration as NixlConnector finds it, vLLM's default where it is not named; None without NixlConnector."""
    lease_named: bool

    @property
    def has_handoff(self) -> bool:
        return nixl.NIXL in self.connectors

    @property
    def joins_pool(self) -> bool:
        return mooncake.STORE in self.connectors

    @property
    def has_native_tier(self) -> bool:
        return offload.NATIVE in self.connectors


def read_transfer_config(config: JsonDict) -> ChainReading:
    """Read a config as vLLM would; what has no meaning there names no connector."""
    entries = [config]
    children = _extra(config).get("connectors")
    if config.get("kv_connector") == "MultiConnector" and isinstance(children, list):
        entries = [child for child in children if isinstance(child, dict)]
    named = [(str(entry["kv_connector"]), _extra(entry)) for entry in entries if entry.get("kv_connector")]
    handoff = next((extra for name, extra in named if name == nixl.NIXL), None)
    return ChainReading(
        connectors=tuple(name for name, _ in named),
        lease=None if handoff is None else handoff.get(LEASE_KEY, nixl.DEFAULT_LEASE_S),
        lease_named=handoff is not None and LEASE_KEY in handoff,
    )


def _extra(entry: JsonDict) -> JsonDict:
    extra = entry.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}
