"""A vLLM engine with our plug-in in one process, driven by questions (`talker.py`) instead of HTTP.

In one process so that its memory is the rank's memory; what HTTP would add is the same few milliseconds for any load.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from connectors.vllm_plugin.weights.settings import SETTINGS_VARIABLE, WORKER_EXTENSION
from tests.benchmarks.weights.shapes import SHAPES, Shape
from tests.benchmarks.weights.talker import answer_questions, own_output

PROMPT_TOKENS = 16
NEW_TOKENS = 8
PROMPTS = 2
KV_BYTES = 2 << 30
"""On a GPU. Fixed: other processes of the benchmark use the same one."""


class Engine:
    def __init__(self, shape: Shape, folder: Path) -> None:
        from vllm import LLM, SamplingParams

        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
        on_gpu = torch.cuda.is_available()
        self._llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=not on_gpu,
            max_model_len=256,
            max_num_seqs=PROMPTS,
            enable_prefix_caching=False,
            worker_extension_cls=WORKER_EXTENSION,
            **({"kv_cache_memory_bytes": KV_BYTES} if on_gpu else {}),
        )
        self._sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False)

    def command(self, name: str, source: Mapping[str, Any] | None = None, mode: str | None = None) -> Any:
        """One `WeightCommand` on the only rank; its report."""
        command = {"name": name, "call": name, "source": dict(source or {}), "mode": mode}
        (report,) = self._llm.collective_rpc("headrace_weights", args=(command,))
        if report["error"]:
            raise RuntimeError(report["error"])
        return report

    def generate(self, seconds: float) -> float:
        """Milliseconds per token over so many seconds."""
        tokens, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            tokens += self._some_tokens()
        return (time.perf_counter() - began) / tokens * 1e3

    def generate_while_prefetching(self, source: Mapping[str, Any]) -> Mapping[str, float]:
        """The same from the beginning of a prefetch to its end."""
        tokens, began = 0, time.perf_counter()
        self.command("prefetch", source)
        while self.command("state")["phase"] == "prefetching":
            tokens += self._some_tokens()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "ms_per_token": seconds / max(1, tokens) * 1e3}

    def _some_tokens(self) -> int:
        prompts = [{"prompt_token_ids": list(range(2, 2 + PROMPT_TOKENS))} for _ in range(PROMPTS)]
        outputs = self._llm.generate(prompts, self._sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    replies = own_output()
    shape, folder, settings = SHAPES[sys.argv[1]], Path(sys.argv[2]), sys.argv[3]
    os.environ[SETTINGS_VARIABLE] = settings
    engine = Engine(shape, folder)
    answer_questions(
        {
            "command": engine.command,
            "generate": engine.generate,
            "generate_while_prefetching": engine.generate_while_prefetching,
        },
        replies,
    )


if __name__ == "__main__":
    main()
