"""Six conversations of two turns with token ids, and what the pool must give back of them.

Before turn 2 the prefill engine's own cache is cleared, so that what it
does not compute came from the pool. The lengths are chosen so that the sum with decode's saves differs from the sum
without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.harness import (
    EXTERNAL_HITS,
    Answer,
    clear_local_cache,
    complete,
    engine_url,
    job_token,
    metric,
    wait_until,
)

BLOCK = 32
COMPLETION = 40
PROMPT_LENGTHS = (70, 95, 129, 161, 200, 250)
NEW_TEXT = 20
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Conversation:
    session: str
    prompt: tuple[int, ...]
    new_text: tuple[int, ...]

    def second_prompt(self, first: Answer) -> tuple[int, ...]:
        return self.prompt + first.token_ids + self.new_text


CONVERSATIONS = tuple(
    Conversation(
        session=f"conversation-{index}",
        prompt=tuple((position * (7 + 2 * index) + 31 * index) % 250 + 1 for position in range(length)),
        new_text=tuple((position * 13 + index) % 250 + 1 for position in range(NEW_TEXT)),
    )
    for index, length in enumerate(PROMPT_LENGTHS)
)


def floor_to_block(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


WITH_DECODE_SAVES = sum(floor_to_block(length + COMPLETION - 1) for length in PROMPT_LENGTHS)
WITHOUT_DECODE_SAVES = sum(floor_to_block(length) for length in PROMPT_LENGTHS)


@dataclass(frozen=True)
class Turns:
    first: tuple[Answer, ...]
    second: tuple[Answer, ...]


def first_turns(router_url: str) -> tuple[Answer, ...]:
    return tuple(complete(router_url, talk.prompt, COMPLETION, talk.session) for talk in CONVERSATIONS)


def second_turns(router_url: str, first: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(
        complete(router_url, talk.second_prompt(answer), COMPLETION, talk.session)
        for talk, answer in zip(CONVERSATIONS, first, strict=True)
    )


@dataclass(frozen=True)
class Measured:
    turns: Turns
    external_hits: float
    """Prefill's external hit tokens over turn 2."""
    status: dict[str, Any]


def measure(status: dict[str, Any], saved_tokens: int) -> Measured:
    """Both turns on a running P/D job; `saved_tokens`: what the pool must hold of turn 1 before turn 2 starts."""
    url, pool = status["router"]["url"], status["pool"]["metrics_url"]
    prefill, token = engine_url(status, "prefill-0"), job_token(status)
    keys_before = metric(pool, "master_key_count")
    first = first_turns(url)
    wanted = keys_before + saved_tokens // BLOCK
    wait_until(f"the pool holds {wanted:.0f} blocks", lambda: metric(pool, "master_key_count") >= wanted)
    clear_local_cache(prefill, token)
    before = metric(f"{prefill}/metrics", EXTERNAL_HITS, token)
    second = second_turns(url, first)
    hits = metric(f"{prefill}/metrics", EXTERNAL_HITS, token) - before
    return Measured(turns=Turns(first=first, second=second), external_hits=hits, status=status)


def assert_same(got: Turns, wanted: Turns) -> None:
    for turn in ("first", "second"):
        for one, other in zip(getattr(got, turn), getattr(wanted, turn), strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
