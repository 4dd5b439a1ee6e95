"""Conversations that go on while weights move, and how many of their prompt tokens the pool gave in which epoch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx

from connectors.engine_client import EXTERNAL_HITS, EngineClient
from tests.e2e.harness import CALL_TIMEOUT_S, wait_until
from tests.fleet.job import PREFILL, engine_of

CLIENTS = 4
TURNS = 6
FIRST, LATER, COMPLETION = 64, 16, 40
"""Tokens: a completion has a block that only the pool can give the next turn's prefill engine."""
LOOK_EVERY_S = 0.05


@contextmanager
def steady_load(job: dict[str, Any]) -> Iterator[Counter[int]]:
    """Statuses of the replies so far; 0 where there was none."""
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def converse(client: int) -> None:
        with httpx.Client(base_url=job["router"]["url"], timeout=CALL_TIMEOUT_S, trust_env=False) as http:
            for talk in count():
                prompt = _text(FIRST, client, talk)
                for turn in range(TURNS):
                    if over.is_set():
                        return
                    status, answer = _ask(http, prompt, session=f"{client}-{talk}")
                    statuses[status] += 1
                    prompt += answer + _text(LATER, client, talk + turn)

    clients = [threading.Thread(target=converse, args=(number,)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    try:
        wait_until("conversations go on", lambda: statuses.total() > 2 * CLIENTS)
        yield statuses
    finally:
        over.set()
        for each in clients:
            each.join()


def _text(length: int, client: int, number: int) -> list[int]:
    return [(place * (7 + client) + 31 * number) % 250 + 1 for place in range(length)]


def _ask(http: httpx.Client, prompt: list[int], session: str) -> tuple[int, list[int]]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": COMPLETION,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    try:
        reply = http.post("/v1/completions", json=body, headers={"x-session-id": session})
    except httpx.TransportError:
        return 0, []
    tokens: list[int] = reply.json()["choices"][0]["token_ids"] if reply.status_code == 200 else []
    return reply.status_code, tokens


@contextmanager
def pool_hits(job: dict[str, Any]) -> Iterator[Counter[int]]:
    """Prompt tokens that prefill engines read from the pool within the block, by the epoch that they were in: an
    engine changes it without a request, so what it counts between two looks belongs to one epoch or is left out."""
    hits: Counter[int] = Counter()
    over = threading.Event()

    def look(name: str) -> None:
        with engine_of(job, name) as engine:
            epoch, counted = _read(engine)
            while not over.wait(LOOK_EVERY_S):
                before, (epoch, total) = epoch, _read(engine)
                if epoch is not None and epoch == before:
                    hits[epoch] += int(total - counted)
                counted = total

    watchers = [threading.Thread(target=look, args=(name,)) for name in PREFILL]
    for each in watchers:
        each.start()
    try:
        yield hits
    finally:
        over.set()
        for each in watchers:
            each.join()


def _read(engine: EngineClient) -> tuple[int | None, float]:
    return engine.fence().epoch, engine.counter(EXTERNAL_HITS)
