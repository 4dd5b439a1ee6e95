"""A vLLM engine with our plug-in in one process, driven by questions (`talker.py`) instead of HTTP.

In one process so that its memory is the rank's memory; what HTTP would add is the same few milliseconds for any load.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from connectors.vllm_plugin.weights.settings import SETTINGS_VARIABLE, WORKER_EXTENSION
from tests.benchmarks.weights.talker import answer_questions, own_output

PROMPT = list(range(2, 18))
NEW_TOKENS = 200
ASKED = tuple(tuple((7 * row + 3 * column + row * column) % 500 + 2 for column in range(96)) for row in range(20))
"""Prompts whose outputs are compared; several blocks of the cache each."""
COMPARED_TOKENS = 16
CHUNK_BYTES = 64 << 20
BLOCK_SIZE = 32
ON_A_GPU = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.3}
"""Fixed: other processes of the benchmark use the same one."""


class Engine:
    def __init__(self, model: str) -> None:
        from vllm import LLM, SamplingParams

        on_gpu = torch.cuda.is_available()
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=not on_gpu,
            max_model_len=256,
            max_num_seqs=2,
            block_size=BLOCK_SIZE,
            worker_extension_cls=WORKER_EXTENSION,
            **(ON_A_GPU if on_gpu else {}),
        )
        self._requests = 0
        self._sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False)

    def command(self, name: str, source: Mapping[str, Any] | None = None, mode: str | None = None) -> Any:
        """One `WeightCommand` on the only rank; its report."""
        command = {"name": name, "call": name, "source": dict(source or {}), "mode": mode}
        (report,) = self._llm.collective_rpc("headrace_weights", args=(command,))
        if report["error"]:
            raise RuntimeError(report["error"])
        return report

    def stock_reload(self, path: str) -> float:
        """Seconds of vLLM's own reload of a checkpoint."""
        began = time.perf_counter()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return time.perf_counter() - began

    def checksums(self) -> Mapping[str, int]:
        """One per parameter and buffer, over all its bits and their places."""
        (found,) = self._llm.collective_rpc(_checksums)
        return dict(found)

    def outputs(self) -> list[list[tuple[int, float]]]:
        """Tokens and their log-probabilities of each prompt, one at a time, with its prefix in the cache: a cold run of
        bfloat16 parts even from itself at near-ties."""
        self._llm.reset_prefix_cache()
        return [self._answer(prompt) for _ in range(2) for prompt in ASKED][len(ASKED) :]

    def _answer(self, prompt: Sequence[int]) -> list[tuple[int, float]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=COMPARED_TOKENS, ignore_eos=True, temperature=0.0, logprobs=0, detokenize=False
        )
        (reply,) = self._llm.generate({"prompt_token_ids": list(prompt)}, sampling, use_tqdm=False)
        (sample,) = reply.outputs
        return [(token, ranked[token].logprob) for token, ranked in zip(sample.token_ids, sample.logprobs, strict=True)]

    def generate(self, seconds: float) -> float:
        """Milliseconds per token over so many seconds."""
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._step()
            steps += 1
        return (time.perf_counter() - began) / steps * 1e3

    def generate_while_prefetching(self, source: Mapping[str, Any], seconds: float) -> Mapping[str, float]:
        """The same while the version is prefetched, again and again: one prefetch may be shorter than a step."""
        steps, prefetches, began = 0, 0, time.perf_counter()
        while time.perf_counter() - began < seconds or self.command("state")["phase"] == "prefetching":
            if self.command("state")["phase"] != "prefetching" and time.perf_counter() - began < seconds:
                self.command("prefetch", source)
                prefetches += 1
            self._step()
            steps += 1
        return {"ms_per_token": (time.perf_counter() - began) / steps * 1e3, "prefetches": prefetches}

    def _step(self) -> None:
        """One token of one request."""
        engine = self._llm.llm_engine
        if not engine.has_unfinished_requests():
            self._requests += 1
            engine.add_request(f"{self._requests}", {"prompt_token_ids": PROMPT}, self._sampling)
        engine.step()


def _checksums(worker: Any) -> Mapping[str, int]:
    model = worker.get_model()
    return {name: _checksum(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).view(-1)
    total = 0
    for start in range(0, bits.numel(), CHUNK_BYTES):
        chunk = bits[start : start + CHUNK_BYTES].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=chunk.device) % 65_521 + 1
        total += int((chunk * places).sum())
    return total


def main() -> None:
    replies = own_output()
    model, os.environ[SETTINGS_VARIABLE], *cores = sys.argv[1:]
    if cores:
        # Threads inherit it. vLLM binds those of its worker processes only, and this is none.
        os.sched_setaffinity(0, map(int, cores))
    engine = Engine(model)
    names = ("command", "stock_reload", "checksums", "outputs", "generate", "generate_while_prefetching")
    answer_questions({name: getattr(engine, name) for name in names}, replies)


if __name__ == "__main__":
    main()
