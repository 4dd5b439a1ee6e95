"""What a finished request and a replay of it say: token ids in, token ids and their log-probabilities out.

vLLM's dialect of all three routes that generate, no IO. `orchestrator/weights/audit.py` reads with it what the router
kept, and `replay_client.py` beside it asks for the same again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DATA = b"data:"
_MEDIA_FIELDS = ("features", "prompt_embeds")


class NotReplayable(Exception):
    """This request cannot be asked again as it was; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What was generated from a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token."""
    cached_tokens: int | None
    """Of the prompt, that were not computed; None where the reply does not say."""


def read_generated(body: Mapping[str, Any], reply: bytes) -> Generated:
    """Of a request and its reply: a JSON object, or the lines of a stream, of which the last may be cut off.

    Raises:
        NotReplayable: it was not asked for, or the prompt is more than its token ids.
    """
    if any(body.get(field) for field in _MEDIA_FIELDS) or _has_media(body.get("messages")):
        raise NotReplayable("its prompt is more than text")
    if body.get("echo"):
        raise NotReplayable("its reply begins with the prompt")
    prompt: Sequence[int] | None = body.get("token_ids")
    tokens: list[int] = []
    logprobs: list[float] = []
    usage: Mapping[str, Any] = {}
    for part in _parts(reply):
        usage = part.get("usage") or usage
        for choice in part.get("choices", ()):
            if choice.get("index"):
                raise NotReplayable("it has several samples")
            prompt = prompt or part.get("prompt_token_ids") or choice.get("prompt_token_ids")
            tokens += choice.get("token_ids") or ()
            logprobs += _logprobs(choice.get("logprobs") or {})
    if not prompt or not tokens or len(tokens) != len(logprobs):
        raise NotReplayable("its reply does not tell all token ids and their log-probabilities")
    return Generated(
        prompt=tuple(prompt), tokens=tuple(tokens), logprobs=tuple(logprobs), cached_tokens=_cached_tokens(usage)
    )


def completion_body(model: str, prompt: Sequence[int], salt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy completion whose reply `read_generated` can read; the router says in it what made it."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "logprobs": 1,
        "return_token_ids": True,
        "return_headrace": True,
    }


def replay_body(model: str, prompt: Sequence[int], given: Sequence[int], salt: str) -> dict[str, Any]:
    """Ask for the log-probabilities of the tokens that were given after a prompt, at each place.

    The route of completions takes any prompt by its token ids, so one form does for requests of all routes.
    """
    return {
        **completion_body(model, prompt, salt, len(given)),
        "logprob_token_ids": sorted(set(given)),
        "return_tokens_as_token_ids": True,
    }


def read_replay(reply: bytes, given: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of the tokens that were given, up to the first place where the replay goes on with another:
    there it still has the same context, and no longer behind it."""
    choice = json.loads(reply)["choices"][0]
    found: list[float] = []
    for token, chosen, scores in zip(given, choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=False):
        name = f"token_id:{token}"
        if name not in scores:
            break
        found.append(float(scores[name]))
        if chosen != token:
            break
    return tuple(found)


def _parts(reply: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a reply."""
    lines = [line[len(_DATA) :] for line in reply.splitlines() if line.startswith(_DATA)] or [reply]
    for line in lines:
        try:
            part = json.loads(line)
        except ValueError:
            continue  # [DONE], or the line at which keeping ended
        if isinstance(part, dict):
            yield part


def _logprobs(given: Mapping[str, Any]) -> list[float]:
    told = given.get("token_logprobs") or [each["logprob"] for each in given.get("content") or ()]
    # JSON has no word for what comes of a computation that went wrong but null.
    return [math.nan if each is None else each for each in told]


def _cached_tokens(usage: Mapping[str, Any]) -> int | None:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if cached is None else int(cached)


def _has_media(messages: Any) -> bool:
    contents = [message.get("content") for message in messages or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)
