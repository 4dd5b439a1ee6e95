"""Models for the figures: a Qwen3 of equal layers, its configuration and the tensors of its checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = 2
"""bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def config(self) -> Mapping[str, Any]:
        """What an HF folder's config.json says."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, in the order of the layers."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            found |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer().items()}
        return found | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}

    def _layer(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }

    def groups(self) -> Sequence[Sequence[str]]:
        """Tensors as a load takes them: what is before the layers, each layer, what is after."""
        names = list(self.tensors())
        per_layer = len(self._layer())
        return [names[:1], *(names[i : i + per_layer] for i in range(1, len(names) - 2, per_layer)), names[-2:]]


SHAPES: Mapping[str, Shape] = {
    "1gb": Shape(
        layers=40, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=64, vocabulary=4096
    ),  # 1.03 GB
    "8b": Shape(
        layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocabulary=151936
    ),  # 16.4 GB, that of Qwen3-8B
    "tiny": Shape(layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocabulary=512),
}
