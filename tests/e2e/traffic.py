"""200 clients at a time: all routes that generate, texts and token ids, streaming and not, sessions of several turns,
two samples, and some who leave before their reply is whole.

`conftest.py` has them served by one colocated engine, `test_mixed_traffic.py` by a fleet of pairs: what both give is
the same, token for token. One sample is greedy, two are drawn with a seed (an engine refuses two greedy ones).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.e2e.harness import CALL_TIMEOUT_S

CLIENTS = 200
COMPLETION = 16
SESSION_TURNS = 3

Kind = Literal["text", "ids", "chat", "generate"]
KINDS: tuple[Kind, ...] = ("text", "ids", "chat", "generate")
PATHS: Mapping[Kind, str] = {
    "text": "/v1/completions",
    "ids": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """What one client asks for. Its turns come one after the other."""

    number: int
    kind: Kind
    stream: bool
    session: str | None
    samples: int
    leaves: bool
    """It closes its connection before its first reply is whole."""

    @property
    def turns(self) -> int:
        return SESSION_TURNS if self.session is not None and not self.leaves else 1

    def ids(self, turn: int) -> list[int]:
        """The new part of a turn's prompt: 40 to 260 tokens at first, then 24."""
        length = 24 if turn else 40 + self.number * 37 % 221
        step, start = 7 + 2 * (self.number % 50), 31 * self.number + 11 * turn
        return [(place * step + start) % 250 + 1 for place in range(length)]

    def text(self, turn: int) -> str:
        """The same as a text; the model's tokenizer makes a token of each letter."""
        return "".join(chr(ord("a") + each % 26) for each in self.ids(turn))


def _client(number: int) -> Client:
    in_session = number // 8 % 5 == 0
    return Client(
        number=number,
        kind=KINDS[number % 4],
        stream=number // 4 % 2 == 0,
        session=f"talk-{number}" if in_session else None,
        samples=2 if number % 11 == 5 and not in_session else 1,
        leaves=number % 9 == 4,
    )


ALL_CLIENTS = tuple(_client(number) for number in range(CLIENTS))


@dataclass
class Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""


@dataclass
class Turn:
    """One reply, as far as the client waited for it."""

    samples: list[Sample]
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    def take(self, kind: Kind, choice: Mapping[str, Any]) -> None:
        """Add a choice of a reply or of one of its events."""
        sample = self.samples[choice["index"]]
        sample.token_ids += choice.get("token_ids") or []
        scores = choice.get("logprobs") or {}
        if kind in ("text", "ids"):
            sample.logprobs += scores.get("token_logprobs") or []
            sample.text += choice["text"]
        else:
            sample.logprobs += [each["logprob"] for each in scores.get("content") or []]
        if kind == "chat":
            sample.text += (choice.get("message") or choice.get("delta") or {}).get("content") or ""


Answers = dict[int, list[Turn]]
"""The turns of each client, by its number."""


async def serve(url: str, clients: tuple[Client, ...] = ALL_CLIENTS, *, anyone_leaves: bool) -> Answers:
    """Let all clients loose at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=CALL_TIMEOUT_S, limits=limits, trust_env=False) as http:
        talks = [_Talk(http, client, client.leaves and anyone_leaves) for client in clients]
        turns = await asyncio.gather(*(talk.run() for talk in talks))
    return {client.number: each for client, each in zip(clients, turns, strict=True)}


class _Talk:
    """One client at work."""

    def __init__(self, http: httpx.AsyncClient, client: Client, leaves: bool) -> None:
        self._http = http
        self._client = client
        self._leaves = leaves
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, str]] = []

    async def run(self) -> list[Turn]:
        turns: list[Turn] = []
        for number in range(self._client.turns):
            self._say(number)
            turn = Turn(samples=[Sample() for _ in range(self._client.samples)])
            turns.append(turn)
            await (self._stream(turn) if self._client.stream else self._whole(turn))
            self._hear(turn.samples[0])
        return turns

    async def _whole(self, turn: Turn) -> None:
        # Those who leave do so at different moments: with their prefill leg in line or running, or their decode leg.
        patience_s = 0.5 * (1 + self._client.number % 8) if self._leaves else None
        try:
            async with asyncio.timeout(patience_s):
                reply = await self._http.post(**self._request())
        except TimeoutError:
            return
        assert reply.status_code == 200, (self._client, reply.text)
        turn.headers = reply.headers
        for choice in reply.json()["choices"]:
            turn.take(self._client.kind, choice)

    async def _stream(self, turn: Turn) -> None:
        last = ""
        async with self._http.stream("POST", **self._request()) as reply:
            assert reply.status_code == 200, (self._client, await reply.aread())
            turn.headers = reply.headers
            async for line in event_lines(reply):
                last = line.removeprefix("data: ") if line else last
                for choice in _choices(line):
                    turn.take(self._client.kind, choice)
                if self._leaves and any(sample.token_ids for sample in turn.samples):
                    return
        assert last == "[DONE]", (self._client, last)

    def _request(self) -> dict[str, Any]:
        client = self._client
        sampling: dict[str, Any] = {"max_tokens": COMPLETION, "temperature": 0, "ignore_eos": True}
        if client.samples > 1:
            sampling |= {"n": client.samples, "temperature": 1, "seed": client.number}
        body: dict[str, Any] = {"model": "tiny", "stream": client.stream}
        if client.kind == "generate":
            body |= {"token_ids": self._ids, "sampling_params": {**sampling, "logprobs": 1}}
        elif client.kind == "chat":
            body |= {"messages": self._messages, **sampling, "logprobs": True, "return_token_ids": True}
        else:
            prompt = self._ids if client.kind == "ids" else self._text
            body |= {"prompt": prompt, **sampling, "logprobs": 1, "return_token_ids": True}
        headers = {}
        if client.session is not None and client.number % 2:
            headers["x-session-id"] = client.session
        elif client.session is not None:
            body["session_id"] = client.session
        return {"url": PATHS[client.kind], "json": body, "headers": headers}

    def _say(self, turn: int) -> None:
        self._ids += self._client.ids(turn)
        self._text += self._client.text(turn)
        self._messages.append({"role": "user", "content": self._client.text(turn)})

    def _hear(self, sample: Sample) -> None:
        self._ids += sample.token_ids
        self._text += sample.text
        self._messages.append({"role": "assistant", "content": sample.text})


async def event_lines(reply: httpx.Response) -> AsyncIterator[str]:
    """httpx's own also ends lines at characters that a random model is free to say, as U+0085."""
    rest = b""
    async for data in reply.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def _choices(line: str) -> Iterator[dict[str, Any]]:
    """Of one line of a stream."""
    text = line.removeprefix("data: ")
    if text and text != "[DONE]":
        event = json.loads(text)
        assert "error" not in event, event
        yield from event["choices"]
