"""What a checkpoint folder says of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from connectors.layout import Attention
from orchestrator.errors import SpecError
from orchestrator.observe.model_folder import attention_of, quantization_of, read_model_folder

DENSE: dict[str, Any] = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("keys", "attention"),
    [
        pytest.param({}, "full", id="dense"),
        pytest.param({"sliding_window": None}, "full", id="Mistral: no window"),
        pytest.param({"sliding_window": 4096}, "other", id="a window on every layer"),
        pytest.param({"sliding_window": 32768, "use_sliding_window": False}, "full", id="Qwen2: window switched off"),
        pytest.param({"sliding_window": 32768, "use_sliding_window": True}, "other", id="window switched on"),
        pytest.param({"layer_types": ["full_attention"] * 3}, "full", id="Qwen3: all layers full"),
        pytest.param({"layer_types": ["sliding_attention", "full_attention"]}, "other", id="gpt-oss: mixture"),
        pytest.param({"layer_types": ["linear_attention", "full_attention"]}, "other", id="Qwen3-Next"),
        pytest.param({"attention_chunk_size": 8192}, "other", id="Llama 4: chunks"),
        pytest.param({"mamba_d_state": 16}, "other", id="Jamba"),
        pytest.param({"hybrid_override_pattern": "M-M*"}, "other", id="Nemotron-H"),
        pytest.param({"kv_lora_rank": 512}, "mla", id="DeepSeek-V3"),
        pytest.param({"kv_lora_rank": None}, "full", id="a latent rank of nothing"),
        pytest.param({"kv_lora_rank": 512, "index_topk": 2048}, "other", id="DeepSeek-V3.2: an indexer's cache"),
        pytest.param({"kv_lora_rank": 512, "linear_attn_config": {"kda_layers": [1]}}, "other", id="Kimi-Linear"),
        pytest.param({"text_config": {"sliding_window": 1024}}, "other", id="Gemma 3: in the text part"),
        pytest.param({"text_config": {"kv_lora_rank": 512}}, "mla", id="Kimi-VL: in the text part"),
        pytest.param({"text_config": None}, "full", id="no text part"),
    ],
)
def test_attention_of(keys: dict[str, Any], attention: Attention) -> None:
    assert attention_of({**DENSE, **keys}) == attention


def test_no_config_takes_no_chances() -> None:
    assert attention_of({}) == "other"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
    ],
)
def test_quantization_of(config: dict[str, Any], method: str | None) -> None:
    assert quantization_of({**DENSE, **config}) == method


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE))
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "gone.safetensors").symlink_to(folder / "nowhere")


def test_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    facts = read_model_folder(str(tmp_path / "model"))
    assert (facts.is_folder, facts.weight_bytes, facts.attention) == (True, 1000, "full")
    assert facts.location == str(tmp_path / "model")
    assert facts == read_model_folder(str(tmp_path / "model"))


@pytest.mark.parametrize("change", ["content", "time", "new file"])
def test_the_fingerprint_follows_the_files(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    before = read_model_folder(str(folder)).fingerprint
    weights = folder / "model.safetensors"
    if change == "content":
        weights.write_bytes(b"w" * 1001)
    elif change == "time":
        os.utime(weights, ns=(1, 1))
    else:
        (folder / "extra.json").write_text("{}")
    assert read_model_folder(str(folder)).fingerprint != before


@pytest.mark.parametrize("text", [None, "", "{", "[]", '"x"', "\xff"])
def test_a_config_that_says_nothing(tmp_path: Path, text: str | None) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    if text is not None:
        (tmp_path / "model" / "config.json").write_text(text, encoding="latin-1")
    assert read_model_folder(str(tmp_path / "model")).attention == "other"


def test_a_name_that_is_no_folder(tmp_path: Path) -> None:
    facts = read_model_folder("Qwen/Qwen3-0.6B")
    assert (facts.location, facts.is_folder, facts.attention) == ("Qwen/Qwen3-0.6B", False, "other")


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path) -> None:
    """A name that no folder can have fails for root as well."""
    with pytest.raises(SpecError, match=r"model\.path: .*make it readable"):
        read_model_folder(str(tmp_path / ("x" * 300)))
