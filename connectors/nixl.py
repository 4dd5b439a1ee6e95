"""NixlConnector: the one-sided read of a prompt's KV from a prefill to a decode engine.

`chain.py` puts its entry first in a role's chain; `engine_env.py` takes the environment from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from connectors.types import Choice, EngineAbilities, JsonDict, Platform, Role

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
    return {"kv_connector": "NixlConnector", "kv_role": _KV_ROLE[role], "kv_connector_extra_config": extra}


Reach = Literal["loopback", "tcp", "rdma"]
"""How far NIXL has to reach: inside one machine, between machines by TCP, between machines by RDMA."""


def ucx_environment(platform: Platform, reach: Reach, nvlink: bool | None) -> tuple[dict[str, str], Choice]:
    """UCX's environment for NIXL, and why.

    `nvlink` False or None (unknown) asks UCX for zero-copy reads of a peer's GPU memory: where it sees no NVLink it
    otherwise reads by TCP at a hundredth of the speed and says so only at debug level.
    """
    if platform == "cpu":
        if reach == "loopback":
            env = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
            return env, Choice(subject="UCX", value="tcp,self,sm on lo", reason="CPU engines on one machine")
        return {"UCX_TLS": "tcp,self,sm"}, Choice(subject="UCX", value="tcp,self,sm", reason="CPU engines")
    env = {}
    if not nvlink:
        env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    if reach == "loopback":
        env["UCX_TLS"] = "cuda_ipc,cuda_copy,sm,tcp,self"
        env["UCX_NET_DEVICES"] = "lo"
    elif reach == "tcp":
        env["UCX_TLS"] = "cuda_ipc,cuda_copy,sm,tcp,self"
    known = {True: "NVLink present", False: "no NVLink", None: "NVLink unknown"}[nvlink]
    value = " ".join(f"{key}={env[key]}" for key in sorted(env)) or "UCX's own choice"
    return env, Choice(subject="UCX", value=value, reason=f"{known}; handoffs go by {reach}")
