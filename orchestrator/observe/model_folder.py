"""What a checkpoint folder says of itself: size, a fingerprint of its files, and its kind of attention."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.layout import Attention
from orchestrator.errors import Complaint, SpecError
from orchestrator.plan.facts import ModelFacts

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_MLA_KEY = "kv_lora_rank"
_OTHER_KEYS = (
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "layers_block_type",
    "attn_type_list",
    "hybrid_override_pattern",
    "mamba_d_state",
    "ssm_state_size",
    "linear_attn_config",
    "linear_num_key_heads",
    "index_topk",
)
"""Windows, mixtures of layers, state-space and linear layers, a second cache for sparse attention."""


def read_model_folder(path: str) -> ModelFacts:
    """Facts about model.path; a path that is no folder is a name for the engine's own cache.

    Raises:
        SpecError: the folder is there and cannot be read.
    """
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            return ModelFacts(location=path, is_folder=False, fingerprint="", weight_bytes=0, attention="other")
        return _read_folder(folder)
    except OSError as error:
        complaint = Complaint(
            field="model.path", problem=f"{error.filename or folder}: {error.strerror}", mend="make it readable"
        )
        raise SpecError("the model's folder", [complaint]) from error


def _read_folder(folder: Path) -> ModelFacts:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    digest = hashlib.sha256()
    weight_bytes = 0
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        if file.suffix in _WEIGHT_SUFFIXES:
            weight_bytes += stat.st_size
    config = _config(folder)
    return ModelFacts(
        location=str(folder.resolve()),
        is_folder=True,
        fingerprint=digest.hexdigest()[:16],
        weight_bytes=weight_bytes,
        attention=attention_of(config),
        quantization=quantization_of(config),
    )


def attention_of(config: Mapping[str, Any]) -> Attention:
    """The kind of attention by the keys of config.json; anything unusual is "other", which takes no chances."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    if not merged:
        return "other"
    kinds = merged.get("layer_types")
    if isinstance(kinds, list) and set(kinds) == {"full_attention"}:
        merged = {key: value for key, value in merged.items() if key != "layer_types"}
    if not merged.get("use_sliding_window", True):
        merged = {key: value for key, value in merged.items() if key != "sliding_window"}
    if any(merged.get(key) for key in _OTHER_KEYS):
        return "other"
    return "mla" if merged.get(_MLA_KEY) else "full"


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """The method that config.json names, where vLLM looks for it; "unknown" where it is quantised without a name."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else "unknown"


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
