"""Log-probabilities of engines that were started on checkpoints: what a load of the same weights must give.

    python -m tests.engines.weights.reference OUT.json RANKS MODEL...

Run as a program of its own: vLLM keeps much in its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.stack.weights.engine_process import NEW_TOKENS, PROMPTS, REPOSITORY

TIMEOUT_S = 400


@dataclass(frozen=True)
class Reference:
    """Engines that start side by side with whatever the test starts."""

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def logprobs(self) -> list[list[float]]:
        """Of each model, in the order of `EngineProcess.logprobs`."""
        code = self.process.wait(TIMEOUT_S)
        assert code == 0, self.log.read_text(errors="replace")[-4000:]
        found: list[list[float]] = json.loads(self.out.read_text())
        return found


@contextmanager
def reference(models: Sequence[Path], folder: Path, *, ranks: int = 1) -> Iterator[Reference]:
    """Begins to ask the models, one after the other."""
    out, log = folder / "reference.json", folder / "reference.log"
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(ranks)),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", __name__, str(out), str(ranks), *map(str, models)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Reference(process, out, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _logprobs(model: str, ranks: int) -> list[float]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    found: list[float] = []
    for output in llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling, use_tqdm=False):
        prompt = output.prompt_token_ids
        found += [ranked[token].logprob for token, ranked in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        (sample,) = output.outputs
        found += [ranked[token].logprob for token, ranked in zip(sample.token_ids, sample.logprobs, strict=True)]
    llm.llm_engine.model_executor.shutdown()
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([_logprobs(model, int(sys.argv[2])) for model in sys.argv[3:]]))
