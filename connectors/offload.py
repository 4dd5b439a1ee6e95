"""OffloadingConnector: vLLM's own CPU (and disk) tier, private to each engine."""

from __future__ import annotations

from connectors.types import JsonDict

NATIVE = "OffloadingConnector"


def connector_entry(cpu_bytes: int, disk_path: str | None) -> JsonDict:
    """The child entry for `MultiConnector`, or the whole config's core where it stands alone."""
    extra: JsonDict = {"cpu_bytes_to_use": cpu_bytes}
    if disk_path is not None:
        extra["spec_name"] = "TieringOffloadingSpec"
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": disk_path}]
    return {"kv_connector": NATIVE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
