"""One connection to a producer: questions with a time limit.

`lines.py` keeps those of a reader, `server.py` asks other producers through one, and answers.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from connectors.weights.bounded import Deadline
from connectors.weights.nixl.messages import (
    ANSWERS,
    Answer,
    Leave,
    Question,
    Refused,
    Release,
    receive,
    send,
)
from connectors.weights.source import FetchError, SourceInfo, source_field


class Channel:
    """One connection to one producer. Every failure is a FetchError that names it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address = f"{host}:{port}"
        self._one_question = threading.Lock()
        self._is_broken = False
        """Something was left unsaid or unheard: the next answer would be to another question."""
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise FetchError(f"producer {self._address} cannot be reached: {error}") from error

    def ask(self, question: Question, timeout_s: float) -> Answer:
        """The answer, refusals too."""
        with self._one_question:
            self._say(question, timeout_s)
            return self._hear(question, timeout_s)

    def demand(self, question: Question, timeout_s: float) -> Answer:
        """The answer; a refusal is an error."""
        answer = self.ask(question, timeout_s)
        if isinstance(answer, Refused):
            raise FetchError(f"producer {self._address}: {answer.reason}")
        return answer

    @contextmanager
    def asked(self, question: Question, deadline: Deadline) -> Iterator[Callable[[], Answer]]:
        """What hears the answer: others may be asked before. As `ask`."""
        with self._one_question:
            self._say(question, deadline.left_s())
            yield lambda: self._hear(question, deadline.left_s())

    def tell(self, word: Leave, timeout_s: float) -> None:
        """Say what has no answer."""
        with self._one_question:
            self._say(word, timeout_s)

    def check_alive(self) -> None:
        """Raises if the producer has hung up. Between questions it never speaks, so anything to read is the end."""
        if self._is_broken:
            raise FetchError(f"producer {self._address} is not talked to any more")
        if self._one_question.locked():
            return
        # Not `select`, which knows no descriptors above 1023.
        ends = select.poll()
        ends.register(self._socket, select.POLLIN)
        if ends.poll(0):
            raise FetchError(f"producer {self._address} is gone")

    def close(self) -> None:
        self._socket.close()

    def _say(self, word: Question | Leave, timeout_s: float) -> None:
        try:
            self._socket.settimeout(timeout_s)
            send(self._socket, word)
        except OSError as error:
            self._is_broken = True
            raise FetchError(f"producer {self._address}: {type(word).__name__} could not be sent: {error}") from error

    def _hear(self, question: Question, timeout_s: float) -> Answer:
        try:
            self._socket.settimeout(timeout_s)
            return receive(self._socket, ANSWERS)
        except (OSError, EOFError, ValueError) as error:
            self._is_broken = True
            raise FetchError(f"producer {self._address}: {type(question).__name__} got no answer: {error}") from error


def leader_address(source: SourceInfo) -> tuple[str, int]:
    """Of the producer that lets readers in."""
    return source_field(source, "host", str), source_field(source, "port", int)


def release(source: SourceInfo, timeout_s: float) -> None:
    """Tell the producers of a version that no more readers will come. Raises FetchError."""
    version = source_field(source, "version", str)
    deadline = Deadline(timeout_s, what=f"releasing version {version}")
    with closing(Channel(*leader_address(source), deadline.left_s())) as leader:
        leader.demand(Release(version), deadline.left_s())
