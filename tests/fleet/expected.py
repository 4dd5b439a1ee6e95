"""The sets of weights, and what they answer: log-probabilities from transformers, which has no engine, no cache and no
pool, after the same few prompts that `traffic.py` sends."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.fleet.versions import WEIGHTS
from tests.stack.weights.checkpoints import checkpoints

PROMPTS = tuple(tuple((7 * row + 3 * column + row * column) % 250 for column in range(40)) for row in range(4))
NEW_TOKENS = 8
SAME, OTHER = 1e-4, 1e-2
"""Log-probabilities of the same weights differ by less, those of other weights by more."""


def weight_sets() -> list[Path]:
    return checkpoints("qwen3", WEIGHTS)


@cache
def expected(weights: int) -> tuple[tuple[float, ...], ...]:
    """Of the tokens of each prompt's greedy completion."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(weight_sets()[weights], dtype=torch.float32)
    tokens = torch.tensor(PROMPTS)
    found = []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = model(tokens).logits[:, -1].log_softmax(-1).max(-1)
            tokens = torch.cat([tokens, best.indices[:, None]], dim=1)
            found.append(best.values)
    return tuple(map(tuple, torch.stack(found, dim=1).tolist()))
