"""Clients of a fleet's one URL: sends the turns of conversations and keeps what comes back as `judge.Reply`s."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx

from tests.e2e.harness import CALL_TIMEOUT_S
from tests.e2e.traffic import event_lines
from tests.stale.judge import Outcome, Reply
from tests.stale.schedule import Ask


class Clients:
    """All conversations of one schedule."""

    def __init__(self, url: str, schedule: int) -> None:
        self._url = url
        self._schedule = schedule
        self._history: dict[str, tuple[int, ...]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self.replies: list[Reply] = []

    async def ask(self, ask: Ask, *, may_be_kept: bool) -> None:
        """Send one turn once the turn before has ended."""
        async with self._turns.setdefault(ask.talk, asyncio.Lock()):
            prompt = self._history.get(ask.talk, ()) + ask.new_part
            call = _Call(ask, prompt)
            started_s = time.monotonic()
            outcome, detail = await self._outcome(call)
            self._history[ask.talk] = prompt + tuple(call.token_ids)
            self.replies.append(
                Reply(
                    schedule=self._schedule,
                    ask=ask,
                    prompt=prompt,
                    token_ids=tuple(call.token_ids),
                    logprobs=tuple(call.logprobs),
                    outcome=outcome,
                    detail=detail,
                    may_be_kept=may_be_kept,
                    started_s=started_s,
                    ended_s=time.monotonic(),
                    **call.made_by(),
                )
            )

    async def _outcome(self, call: _Call) -> tuple[Outcome, str]:
        try:
            async with asyncio.timeout(call.ask.leaves_s):
                async with httpx.AsyncClient(base_url=self._url, timeout=CALL_TIMEOUT_S, trust_env=False) as http:
                    return await call.send(http)
        except TimeoutError:
            return "left", ""
        except httpx.HTTPError as error:
            return "refused", f"{type(error).__name__}: {error}"


class _Call:
    """One request and what has come of its reply."""

    def __init__(self, ask: Ask, prompt: tuple[int, ...]) -> None:
        self.ask = ask
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._prompt = prompt
        self._usage: Mapping[str, Any] = {}
        self._label: Mapping[str, Any] = {}

    async def send(self, http: httpx.AsyncClient) -> tuple[Outcome, str]:
        headers = {"x-session-id": self.ask.session}
        async with http.stream("POST", "/v1/completions", json=self._body(), headers=headers) as reply:
            if reply.status_code != 200:
                return "refused", f"{reply.status_code}: {(await reply.aread()).decode(errors='replace')[:300]}"
            if not self.ask.stream:
                self._take(json.loads(await reply.aread()))
                return "whole", ""
            async for line in event_lines(reply):
                text = line.removeprefix("data: ")
                if text == "[DONE]":
                    return "whole", ""
                if text:
                    event = json.loads(text)
                    if "error" in event:
                        return "refused", str(event["error"])[:300]
                    self._take(event)
        return "refused", "the stream ended without [DONE]"

    def made_by(self) -> dict[str, Any]:
        """Fields of a `Reply` that the fleet itself tells."""
        details = self._usage.get("prompt_tokens_details") or {}
        return {
            "epochs": tuple(self._label.get("epochs", ())),
            "versions": tuple(self._label.get("weight_versions", ())),
            "single_version": bool(self._label.get("single_version")),
            "attempts": int(self._label.get("attempts", 0)),
            "cached_tokens": int(details.get("cached_tokens") or 0),
            "replicas": f"{self._label.get('prefill')} > {self._label.get('decode')}",
        }

    def _body(self) -> dict[str, Any]:
        ask = self.ask
        sampling = {"temperature": 0} if ask.sampling_seed is None else {"temperature": 1, "seed": ask.sampling_seed}
        body = {
            "model": "tiny",
            "prompt": list(self._prompt),
            "max_tokens": ask.completion,
            **sampling,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "return_headrace": True,
            "stream": ask.stream,
        }
        if ask.stream:
            body["stream_options"] = {"include_usage": True}
        if ask.salt:
            body["cache_salt"] = ask.salt
        return body

    def _take(self, part: Mapping[str, Any]) -> None:
        """Of a whole reply, or of one event."""
        for choice in part.get("choices", ()):
            self.token_ids += choice.get("token_ids") or []
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        self._usage = part.get("usage") or self._usage
        self._label = part.get("headrace") or self._label
