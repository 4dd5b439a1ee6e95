"""Log-probabilities that a cache-less engine gives the tokens of a reply after its prompt: the truth of `judge.py`.

Any reply can be looked up, whatever was sampled. Answers are kept in .cache, by checkpoint.

    python -m tests.stale.reference QUESTIONS.json ANSWERS.json

is the engine's part, a program of its own: vLLM keeps much in its process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.harness import ENGINE

REPOSITORY = Path(__file__).parents[2]
KEPT = REPOSITORY / ".cache" / "stale"
TIMEOUT_S = 900


@dataclass(frozen=True)
class Question:
    """How likely is `reply` after `prompt`, token by token, with these weights?"""

    checkpoint: Path
    prompt: tuple[int, ...]
    reply: tuple[int, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.prompt, self.reply]).encode()).hexdigest()


Answers = Mapping[Question, Sequence[float]]


def reference(questions: Sequence[Question], scratch: Path) -> Answers:
    """All answers: those that are kept, and the rest from an engine per checkpoint. `scratch`: a folder for its log."""
    kept = {checkpoint: _Kept(checkpoint) for checkpoint in sorted({each.checkpoint for each in questions})}
    missing = {
        checkpoint: {each.key: each for each in questions if each.checkpoint == checkpoint and each.key not in known}
        for checkpoint, known in kept.items()
    }
    asked = [
        {"checkpoint": str(checkpoint), "pairs": [[each.prompt, each.reply] for each in wanted.values()]}
        for checkpoint, wanted in missing.items()
        if wanted
    ]
    if asked:
        answers = iter(_run(asked, scratch))
        for checkpoint, wanted in missing.items():
            if wanted:
                kept[checkpoint].add(dict(zip(wanted, next(answers), strict=True)))
    return {each: kept[each.checkpoint][each.key] for each in questions}


class _Kept:
    """The answers of one checkpoint on disk."""

    def __init__(self, checkpoint: Path) -> None:
        content = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:16]
        self._path = KEPT / f"{content}.json"
        self._values: dict[str, list[float]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> list[float]:
        return self._values[key]

    def add(self, values: Mapping[str, list[float]]) -> None:
        self._values.update(values)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._values))
        partial.rename(self._path)


def _run(asked: Sequence[Mapping[str, Any]], scratch: Path) -> list[list[list[float]]]:
    questions, answers, log = (scratch / f"reference{end}" for end in ("-questions.json", "-answers.json", ".log"))
    questions.write_text(json.dumps(asked))
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", __name__, str(questions), str(answers)]
    with log.open("wb") as output:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
    found: list[list[list[float]]] = json.loads(answers.read_text())
    return found


def _logprobs(checkpoint: str, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
    from vllm import LLM, SamplingParams

    llm = LLM(checkpoint, **ENGINE, enable_prefix_caching=False)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": [*prompt, *reply]} for prompt, reply in pairs]
    found = []
    for output, (_, reply) in zip(llm.generate(prompts, sampling, use_tqdm=False), pairs, strict=True):
        ranked = output.prompt_logprobs[-len(reply) :]
        found.append([each[token].logprob for each, token in zip(ranked, reply, strict=True)])
    llm.llm_engine.model_executor.shutdown()
    return found


if __name__ == "__main__":
    questions = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([_logprobs(each["checkpoint"], each["pairs"]) for each in questions]))
