"""Makes tiny checkpoints with random weights and a byte tokenizer: they start fast, and a wrong KV block shows.

Queries are scaled up so that attention picks out few positions: then a missing or foreign block changes the output,
where an untrained model would average it away. Run by the engine stack's interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

Architecture = Literal["qwen3", "qwen3_tied", "llama_biased", "qwen3_moe"]

LAYERS = 4
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QUERY_SCALE = 6.0
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(out: Path, seed: int = 0, architecture: Architecture = "qwen3", layers: int = LAYERS) -> Path:
    """Write the checkpoint to `out` unless it is there; equal seeds give equal weights."""
    if (out / "config.json").exists():
        return out
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(partial)
    _write_weights(partial, vocabulary, seed, architecture, layers)
    partial.rename(out)
    return out


def _write_tokenizer(out: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    entries = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in SPECIALS:
        entries[special] = len(entries)
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 4096,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(entries)


def _write_weights(out: Path, vocabulary: int, seed: int, architecture: Architecture, layers: int) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_config(vocabulary, architecture, layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(QUERY_SCALE)
            elif parameter.dim() > 1 or name.endswith(".bias"):
                parameter.normal_(std=HIDDEN**-0.5)
    model.save_pretrained(out)


def _config(vocabulary: int, architecture: Architecture, layers: int) -> Any:
    import transformers

    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": architecture == "qwen3_tied",
        "eos_token_id": vocabulary - 1,
        "dtype": "float32",
    }
    if architecture == "llama_biased":
        return transformers.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)
    if architecture == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**sizes, **experts, decoder_sparse_step=1)
    return transformers.Qwen3Config(**sizes)
