"""Starts the trainers and readers of these tests as processes of their own, and talks to them over pipes.

They are forked from one process that has imported torch already: importing it takes longer than most of what is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ENVIRONMENT = {
    # NIXL on loopback: shared memory between processes, TCP where that is not to be had.
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "NIXL_LOG_LEVEL": "WARN",
}
ANSWER_S = 60
PRELOADED = ["torch.distributed.fsdp", "connectors.publisher.nixl", "connectors.weights.nixl.transport"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Program:
    """A process that runs `body` with its end of a pipe, over which both sides send (word, value)."""

    def __init__(self, body: Callable[..., None], *arguments: Any, environment: dict[str, str]) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(theirs, environment, body, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, word: str, *values: Any) -> None:
        self._pipe.send((word, *values))

    def hear(self, *words: str, timeout_s: float = ANSWER_S) -> Any:
        """The value of the next word, which must be one of these."""
        assert self._pipe.poll(timeout_s), f"nothing heard of {words}"
        word, value = self._pipe.recv()
        assert word in words, (word, value)
        return value

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()


def _run(pipe: Connection, environment: dict[str, str], body: Callable[..., None], *arguments: Any) -> None:
    import torch

    os.environ.update(ENVIRONMENT | environment)
    torch.set_num_threads(1)
    body(pipe, *arguments)
