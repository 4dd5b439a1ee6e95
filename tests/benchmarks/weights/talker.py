"""Processes that answer questions, one JSON line each: engines, trainers and plain readers of the benchmark.

`parts.py` asks through `Talker`; the programs (`engine.py`, `trainer.py`, `plain.py`) answer in `answer_questions`.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tests.benchmarks.processes import ROOT, BenchmarkError, end

ANSWER_S = 900.0
LOG_LINES = 25


class Talker:
    """One of them, from outside."""

    def __init__(self, name: str, popen: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self.pid = popen.pid
        self._popen = popen
        self._log = log

    def ask(self, question: str, **arguments: Any) -> Any:
        self.send(question, **arguments)
        return self.receive()

    def send(self, question: str, **arguments: Any) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps([question, arguments]) + "\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise BenchmarkError(f"{self.name} is gone. {self._log_end()}") from None

    def receive(self) -> Any:
        assert self._popen.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_S):
                raise BenchmarkError(f"{self.name} has not answered in {ANSWER_S:.0f} s. {self._log_end()}")
        line = self._popen.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self.name} ended. {self._log_end()}")
        ok, answer = json.loads(line)
        if not ok:
            raise BenchmarkError(f"{self.name}: {answer}")
        return answer

    def _log_end(self) -> str:
        return "The end of its log:\n" + "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def ask_all(talkers: Sequence[Talker], question: str, **arguments: Any) -> list[Any]:
    """The same question to all, answered side by side."""
    for talker in talkers:
        talker.send(question, **arguments)
    return [talker.receive() for talker in talkers]


@contextmanager
def talking(
    name: str, module: str, arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> Iterator[Talker]:
    """The program `tests.benchmarks.weights.<module>`."""
    log = folder / f"{name}.log"
    with log.open("ab") as errors:
        popen = subprocess.Popen(
            [sys.executable, "-m", f"tests.benchmarks.weights.{module}", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield Talker(name, popen, log)
    finally:
        end(popen)


def own_output() -> TextIO:
    """Standard output for answers alone; whatever libraries print goes to the log from now on."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def answer_questions(answers: Mapping[str, Callable[..., Any]], replies: TextIO) -> None:
    """Until the other side closes."""
    for line in sys.stdin:
        question, arguments = json.loads(line)
        try:
            reply = [True, answers[question](**arguments)]
        except Exception as error:
            traceback.print_exc()
            reply = [False, f"{question}: {type(error).__name__}: {error}"]
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
