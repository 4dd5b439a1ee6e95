"""Words shared by the connector files: roles, what an engine can do, and why something was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["prefill", "decode", "colocated"]
Platform = Literal["cpu", "cuda"]
JsonDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setting that was chosen for the user, and the reason; part of the plan."""

    subject: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """What an installed engine stack can do, as asked of it by `ask_engine.py`."""

    python: str
    platform: Platform
    vllm_version: str
    mooncake_version: str | None
    nixl_version: str | None
    mooncake_master: str | None
    """Path of the program, None where it is not installed."""
    mooncake_client: str | None
    save_decode_cache: bool
    """MooncakeStoreConnector can save generated blocks (vLLM 0.32; not 0.25.1)."""
    kv_cache_layouts: tuple[str, ...]
    """Names that VLLM_KV_CACHE_LAYOUT takes; block-outermost ones ("BLHNC") since the layouts of RFC #42082."""
    cross_layers_blocks: bool
    """Both connectors read enable_cross_layers_blocks (vLLM 0.25.1; gone from NIXL in 0.32)."""
    scale_out_flag: bool
    """--enable-scale-out exists; without the flag /inference/v1/generate answers 403 (field case A42)."""
    load_failure_policy: bool
    per_request_metrics: bool
    """--enable-per-request-metrics exists: a prefill reply says how long it took inside the engine."""
    quiet_access_log: bool
    """--disable-access-log-for-endpoints exists."""
    handoff_lease: bool
    """NixlConnector reads kv_lease_duration."""
    middleware_flag: bool
    """--middleware exists: the API server loads the fence."""
    weight_transfer: bool
    """--weight-transfer-config and --worker-extension-cls exist: weights can be replaced in place."""
    plugin_path: str | None
    """What PYTHONPATH must be for the interpreter to find `connectors.vllm_plugin`; "" where it finds it without. None
    where the plug-in has to be installed there: the folder it lies in holds packages that would hide the engine's."""


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of one engine, under vLLM's argument names without the suffix."""

    tensor: int
    pipeline: int
    prefill_context: int
    decode_context: int
    data: int

    @property
    def ranks(self) -> int:
        """Worker processes of one engine; decode-context ranks reuse the tensor ranks."""
        return self.tensor * self.pipeline * self.prefill_context * self.data
