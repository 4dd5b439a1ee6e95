"""Clients of the job while its weights move: each reply must be what the weights that it names give."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.harness import CALL_TIMEOUT_S, wait_until
from tests.fleet.expected import NEW_TOKENS, PROMPTS, SAME, expected
from tests.fleet.versions import weights_of

AGAIN_S = 0.2
"""Until a client that was not served asks again."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    prompt: int
    """Its number."""
    status: int
    """0: the connection was lost."""
    body: Any
    logprobs: tuple[float, ...]

    @property
    def label(self) -> Any:
        return self.body["headrace"]

    @property
    def off_by(self) -> float:
        """How far it is from what the weights give whose version it names."""
        (version,) = self.label["weight_versions"]
        return difference([self.logprobs], [expected(weights_of(version))[self.prompt]])


def complete(job: dict[str, Any], prompt: int, session: str) -> Reply:
    body = {
        "model": "tiny",
        "prompt": PROMPTS[prompt],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_headrace": True,
    }
    url = f"{job['router']['url']}/v1/completions"
    headers = {"x-session-id": session}
    try:
        reply = httpx.post(url, json=body, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False)
    except httpx.TransportError as error:
        return Reply(prompt=prompt, status=0, body=repr(error), logprobs=())
    found = reply.json()
    logprobs = found["choices"][0]["logprobs"]["token_logprobs"] if reply.status_code == 200 else ()
    return Reply(prompt=prompt, status=reply.status_code, body=found, logprobs=tuple(logprobs))


def logprobs(job: dict[str, Any]) -> list[tuple[float, ...]]:
    """What the job answers to each prompt now."""
    return [complete(job, prompt, f"probe-{prompt}").logprobs for prompt in range(len(PROMPTS))]


def difference(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    pairs = [pair for one, other in zip(left, right, strict=True) for pair in zip(one, other, strict=True)]
    return max(abs(one - other) for one, other in pairs)


@contextmanager
def traffic(job: dict[str, Any], clients: int = 2) -> Iterator[list[Reply]]:
    """Requests run until the end of the block, and are served before it and at its end."""
    replies: list[Reply] = []
    over = threading.Event()

    def work(client: int) -> None:
        turn = 0
        while not over.is_set():
            replies.append(complete(job, (client + turn) % len(PROMPTS), f"client-{client}-{turn // 3}"))
            turn += 1
            if replies[-1].status != 200:
                time.sleep(AGAIN_S)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        wait_until("requests run before the update", lambda: len(served(replies)) >= clients)
        yield replies
        count = len(served(replies))
        wait_until("requests run after the update", lambda: len(served(replies)) >= count + 2 * clients)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def served(replies: Sequence[Reply]) -> list[Reply]:
    return [reply for reply in list(replies) if reply.status == 200]


def check(replies: Sequence[Reply], versions: dict[int, str]) -> None:
    """All answered, each of them by one version and as its weights do; and these versions, by their epochs."""
    assert [reply.body for reply in replies if reply.status != 200] == []
    assert {reply.label["single_version"] for reply in replies} == {True}
    found = {reply.label["epochs"][0]: reply.label["weight_versions"][0] for reply in replies}
    assert found == versions
    worst = max(replies, key=lambda reply: reply.off_by)
    assert worst.off_by < SAME, worst
