"""The environment of one engine process."""

from __future__ import annotations

import json
from collections.abc import Sequence

from connectors.mooncake import TCP_ENVIRONMENT, Protocol, transfer_port_environment
from connectors.types import Platform
from connectors.vllm_plugin.fence_rules import INSTANCE_VARIABLE, TOKEN_FILE_VARIABLE
from connectors.vllm_plugin.resting import REST_VARIABLE
from connectors.vllm_plugin.weights.settings import SETTINGS_VARIABLE, LoadMode

HASH_SEED = "0"
"""Any fixed value does, as long as every engine process has the same one: block hashes differ otherwise and a pool
never hits (A23)."""

KEEP_ALIVE_S = 75
"""How long an engine keeps an idle connection. Above the router's own limit, so that the router closes first (A16)."""

OWNED_ENVIRONMENT: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "replicas are placed on GPUs",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "ports are planned",
    "VLLM_RPC_BASE_PATH": "every engine has a folder of its own, or their lookup sockets collide",
    "VLLM_SERVER_DEV_MODE": "resets and weight updates need the development routes",
    "VLLM_API_KEY": "engines ask for the job's own token",
    TOKEN_FILE_VARIABLE: "the job's token file is generated",
    INSTANCE_VARIABLE: "every life of an engine names itself",
    SETTINGS_VARIABLE: "set [weights]",
    "MOONCAKE_CONFIG_PATH": "the file is generated; set [pool]",
    **dict.fromkeys(transfer_port_environment(1, 6), "ports are planned"),
}
"""Variables that a job file may not set, with the reason. PYTHONHASHSEED may be set to the one value it has anyway."""


_TRANSFER_VARIABLES = ("MC_*", "MOONCAKE_*")

NO_COMPILER_VARIABLE = "TORCHDYNAMO_DISABLE"
"""Functions marked for torch.compile run as they are."""

KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""GiB of KV cache of a CPU engine; vLLM takes it over --kv-cache-memory-bytes."""

UNSET_FOR_ENGINES = (
    *_TRANSFER_VARIABLES,
    "UCX_*",
    "VLLM_NIXL_*",
    KV_SPACE_VARIABLE,
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_PORT",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_API_KEY",
    INSTANCE_VARIABLE,
    SETTINGS_VARIABLE,
    REST_VARIABLE,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Taken out of the launching environment: there it would change engines behind the rules. A job file may set them."""

UNSET_FOR_STORE = _TRANSFER_VARIABLES
"""The same for the pool's own processes."""


def common_environment(
    *, advertised_host: str, rpc_dir: str, side_channel_port: int | None, token_file: str
) -> dict[str, str]:
    """What every engine gets. `advertised_host` must be reachable from the other nodes (A30)."""
    env = {
        TOKEN_FILE_VARIABLE: token_file,
        "PYTHONHASHSEED": HASH_SEED,
        "VLLM_HOST_IP": advertised_host,
        "VLLM_RPC_BASE_PATH": rpc_dir,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if side_channel_port is not None:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = advertised_host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
    return env


def store_environment(
    *, config_path: str, advertised_host: str, protocol: Protocol, ports: tuple[int, int]
) -> dict[str, str]:
    """What an engine that joins the pool gets; `ports` is (first, count) of its store clients' own ports."""
    env = {"MOONCAKE_CONFIG_PATH": config_path, "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": advertised_host}
    if protocol == "tcp":
        env |= TCP_ENVIRONMENT
    return env | transfer_port_environment(*ports)


def weights_environment(*, transport: str, mode: LoadMode, keep_copy: bool, advertised_host: str) -> dict[str, str]:
    """What an engine gets whose weights can be replaced in place. Peers and trainers reach it by `advertised_host`."""
    settings = {"mode": mode, "keep_copy": keep_copy, "host": advertised_host, "sources": [{"transport": transport}]}
    return {SETTINGS_VARIABLE: json.dumps(settings, sort_keys=True)}


CPU_REST_US = 10_000


def resting_environment(platform: Platform) -> dict[str, str]:
    """Engines that compute on cores must not lose them to what waits. Beside a GPU cores are plenty."""
    return {REST_VARIABLE: str(CPU_REST_US)} if platform == "cpu" else {}


def cpu_binding(core_groups: Sequence[Sequence[int]]) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for an engine whose ranks get these cores, one group per rank: "0,1|2,3".

    Unbound engines on one machine fight for cores: ten times slower prefill was seen.
    """
    return "|".join(",".join(str(core) for core in group) for group in core_groups)
