"""The engine stack that plans are made for where none is installed. `orchestrator/plan` uses it."""

from __future__ import annotations

from connectors.types import EngineAbilities

REFERENCE_ABILITIES = EngineAbilities(
    python="python3",
    platform="cuda",
    vllm_version="0.32.0",
    mooncake_version="0.3.13.post1",
    nixl_version="1.5.1",
    mooncake_master="mooncake_master",
    mooncake_client="mooncake_client",
    save_decode_cache=True,
    kv_cache_layouts=("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
    cross_layers_blocks=False,
    scale_out_flag=True,
    load_failure_policy=True,
    per_request_metrics=True,
    quiet_access_log=True,
    handoff_lease=True,
    middleware_flag=True,
    weight_transfer=True,
    plugin_path="",
)
"""Stands in where no engine is installed, so that a plan can still be looked at; such a plan is never started."""
