"""A model of an engine's streams: one fixed answer, told in the events of vLLM 0.32, from wherever a prompt ends.

It withholds text as the engine does: of characters that are not whole, and of what may become a stop text. Asked to
go on from inside a character, it begins with the text of the whole prompt, as the engine does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.core.split import Route

PROMPT = [7, 8, 9]
PROMPT_TEXT = b"say: "
EOS = 2
_FIRST_ID = 100
_IDS = {"completions": "cmpl-", "chat": "chatcmpl-", "generate": "generate-tokens-"}


@dataclass
class _Detokenizer:
    """The engine's incremental decoding, with its search for stop texts."""

    given: bytes
    stops: list[str]
    included: bool
    min_tokens: int
    text: str = ""
    sent: int = 0
    count: int = 0
    prefix: str = ""

    def __post_init__(self) -> None:
        whole = self.given.decode(errors="replace")
        self.prefix = "" if whole.endswith("\ufffd") else whole

    @property
    def withheld(self) -> int:
        return 0 if self.included else max(map(len, self.stops), default=1) - 1

    def add(self, piece: bytes) -> str | None:
        """The stop text that this token completes."""
        self.count += 1
        self.given += piece
        whole = self.given.decode(errors="replace")
        new = ""
        if len(whole) > len(self.prefix) and not whole.endswith("\ufffd"):
            new, self.prefix = whole[len(self.prefix) :], whole
        self.text += new
        found = [
            (at + len(stop), order, stop)
            for order, stop in enumerate(self.stops)
            if new and self.count > self.min_tokens
            if (at := self.text.find(stop, max(0, len(self.text) - len(new) - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        self.text = self.text[: end if self.included else end - len(stop)]
        return stop

    def delta(self, finished: bool) -> str:
        start = self.sent
        self.sent = max(start, len(self.text) - (0 if finished else self.withheld))
        return self.text[start : self.sent]


@dataclass
class ModelEngine:
    route: Route
    pieces: list[bytes]
    """The answer's tokens."""
    ends: bool = False
    """It ends by itself, with a token that has no text."""
    groups: Sequence[int] = (1,)
    """How many tokens the events have, in turn."""
    version: str = "v1"
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [_FIRST_ID + number for number in range(len(self.pieces))] + ([EOS] if self.ends else [])

    def stream(self, body: dict[str, Any]) -> list[bytes]:
        self.requests.append(body)
        return [b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode() for event in self._events(body)] + [
            b"data: [DONE]\n\n"
        ]

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if self.route == "chat":
            reused = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
            return reused or PROMPT
        prompt = body["prompt" if self.route == "completions" else "token_ids"]
        return prompt if isinstance(prompt, list) else PROMPT

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt = self._prompt(body)
        done = len(prompt) - len(PROMPT)
        assert prompt == PROMPT + self.tokens[:done]
        sampling = body["sampling_params"] if self.route == "generate" else body
        options = body.get("stream_options") or {}
        head = self._head(len(self.requests))
        asked = body.get("return_token_ids")
        if self.route == "chat":
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield head | {"choices": [role], "prompt_token_ids": prompt if asked else None, "prompt_text": None}
        count = offset = 0
        for number, (ids, text, finish, stop) in enumerate(self._steps(done, sampling)):
            count += len(ids)
            choice = self._choice(ids, text, finish, stop, asked)
            if sampling.get("logprobs"):
                choice["logprobs"], offset = self._logprobs(ids, offset)
            if finish and self.route == "generate":
                choice["weight_versions"] = [{"version": self.version, "start": 0, "end": count}]
            event = head | {"choices": [choice]}
            if asked and number == 0 and self.route != "chat":
                (choice if self.route == "completions" else event)["prompt_token_ids"] = prompt
            if options.get("continuous_usage_stats"):
                event["usage"] = self._usage(len(prompt), count)
            yield event
        if options.get("include_usage"):
            details = {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1}}
            yield head | {"choices": [], "usage": self._usage(len(prompt), count) | details}

    def _steps(self, done: int, sampling: dict[str, Any]) -> Iterator[tuple[list[int], str, str | None, str | None]]:
        """Tokens, text, finish and stop reason of each event."""
        pieces = [*self.pieces, b""] if self.ends else self.pieces
        tokens = self.tokens
        stops = sampling.get("stop") or []
        detokenizer = _Detokenizer(
            given=PROMPT_TEXT + b"".join(pieces[:done]),
            stops=[stops] if isinstance(stops, str) else stops,
            included=bool(sampling.get("include_stop_str_in_output")),
            min_tokens=sampling.get("min_tokens", 0),
        )
        cap = sampling.get("max_completion_tokens") or sampling.get("max_tokens") or len(tokens)
        last = min(len(tokens), done + cap)
        ids: list[int] = []
        sizes = iter(self.groups)
        size = next(sizes)
        for at in range(done, last):
            ids.append(tokens[at])
            stop = detokenizer.add(pieces[at])
            finish = "stop" if stop is not None or tokens[at] == EOS else "length" if at == last - 1 else None
            if finish or len(ids) >= size:
                yield ids, detokenizer.delta(finish is not None), finish, stop
                ids, size = [], next(sizes, size)
            if finish:
                return

    def _head(self, run: int) -> dict[str, Any]:
        own = f"{_IDS[self.route]}{run}"
        if self.route == "generate":
            return {"request_id": own}
        kind = "text_completion" if self.route == "completions" else "chat.completion.chunk"
        return {"id": own, "object": kind, "created": 1000 + run, "model": "m"}

    def _choice(
        self, ids: list[int], text: str, finish: str | None, stop: str | None, asked: bool | None
    ) -> dict[str, Any]:
        common: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.route == "completions":
            told = {"prompt_token_ids": None, "token_ids": ids if asked else None}
            return {"index": 0, "text": text} | common | {"stop_reason": stop} | told
        if self.route == "chat":
            ended = {"stop_reason": stop} if finish else {}
            return {"index": 0, "delta": {"content": text}} | common | ended | {"token_ids": ids if asked else None}
        return common | {"stop_reason": stop, "token_ids": ids, "weight_versions": None, "text": text}

    def _logprobs(self, ids: list[int], offset: int) -> tuple[dict[str, Any], int]:
        names = [f"<{token}>" for token in ids]
        if self.route != "completions":
            return {"content": [{"token": name, "logprob": -1.0} for name in names]}, 0
        offsets = [offset + sum(map(len, names[:number])) for number in range(len(names))]
        logprobs = {"text_offset": offsets, "token_logprobs": [-1.0] * len(ids), "tokens": names}
        return logprobs, offset + sum(map(len, names))

    @staticmethod
    def _usage(prompt: int, count: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
