"""NixlConnector: the one-sided read of a prompt's KV from a prefill to a decode engine.

`chain.py` puts its entry first in a role's chain; `engine_env.py` takes the environment from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from connectors.types import Choice, EngineAbilities, JsonDict, Platform, Role

NIXL = "NixlConnector"

DEFAULT_LEASE_S = 30
"""vLLM's own kv_lease_duration: what rules where a transfer config does not name one, or where it is not read."""

_KV_ROLE: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM deprecates kv_both for this connector: prefill engines produce handoffs, decode engines consume them."""


@dataclass(frozen=True, kw_only=True)
class NixlSettings:
    lease_s: int
    """kv_lease_duration: how long an unread handoff is kept. Read after it, blocks may hold another prompt's KV."""
    num_threads: int
    cross_layers_blocks: bool
    """One KV region for all layers, on a vLLM where the connector itself asks for it."""


def connector_entry(role: Role, settings: NixlSettings, abilities: EngineAbilities) -> JsonDict:
    """The child entry for `MultiConnector`, or the whole config's core where NIXL stands alone."""
    extra: JsonDict = {"num_threads": settings.num_threads}
    if abilities.handoff_lease:
        extra["kv_lease_duration"] = settings.lease_s
    if settings.cross_layers_blocks:
        extra["enable_cross_layers_blocks"] = "True"
    return {"kv_connector": NIXL, "kv_role": _KV_ROLE[role], "kv_connector_extra_config": extra}


Reach = Literal["loopback", "any", "tcp", "rdma"]
"""How NIXL reaches the other engine: inside one machine; between machines by whatever UCX finds best, by TCP alone, or
by RDMA, which UCX itself prefers where it finds a device."""


def ucx_environment(platform: Platform, reach: Reach, nvlink: bool | None) -> tuple[dict[str, str], Choice]:
    """UCX's environment for NIXL, and why.

    `nvlink` False or None (unknown) asks UCX for zero-copy reads of a peer's GPU memory: where it sees no NVLink it
    otherwise reads by TCP at a hundredth of the speed and says so only at debug level.
    """
    env: dict[str, str] = {}
    if reach in ("loopback", "tcp"):
        env["UCX_TLS"] = "tcp,self,sm" if platform == "cpu" else "cuda_ipc,cuda_copy,sm,tcp,self"
    if reach == "loopback":
        env["UCX_NET_DEVICES"] = "lo"
    known = "CPU engines"
    if platform == "cuda":
        known = {True: "NVLink present", False: "no NVLink", None: "NVLink unknown"}[nvlink]
        if not nvlink:
            env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    value = " ".join(f"{key}={env[key]}" for key in sorted(env)) or "UCX's own choice"
    return env, Choice(subject="UCX", value=value, reason=f"{known}; {_REACHED[reach]}")


_REACHED: dict[Reach, str] = {
    "loopback": "all engines are on one machine",
    "any": "nodes reach each other by what UCX finds best; pin it with handoff.transport",
    "tcp": "nodes reach each other by tcp",
    "rdma": "nodes reach each other by RDMA, which UCX prefers itself",
}
