"""What the load generators send: completions of token ids, with a session id in a header. Pure.

`wrk.py`, `paced_load.py`, `streams.py` and `idle_sessions.py` send it to either router.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal

SizeName = Literal["3k7", "116k"]
SESSION_HEADER = "x-session-id"
SESSIONS = 512
CONNECTIONS = 64
PATH = "/v1/completions"
VOCABULARY = 151_643
"""Of Qwen's tokenizers: most ids have five or six digits."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A body size, named as the keys of the result do."""

    name: SizeName
    token_ids: int


SIZES = (Size(name="3k7", token_ids=500), Size(name="116k", token_ids=16_000))


def completion_body(token_ids: int, *, stream: bool = False) -> bytes:
    """A request of so many prompt tokens; the same bytes each time."""
    prompt = random.Random(token_ids).choices(range(VOCABULARY), k=token_ids)
    body = {"model": "stub", "prompt": prompt, "max_tokens": 1024, "temperature": 1.0, "stream": stream}
    return json.dumps(body).encode()


def session_ids(count: int) -> list[str]:
    return [f"rollout-{number:08d}" for number in range(count)]


def http_request(body: bytes, session_id: str) -> bytes:
    """The bytes on the wire."""
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"{SESSION_HEADER}: {session_id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
