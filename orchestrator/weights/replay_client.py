"""Asks a job's router for completions as any client does, and reads in the replies what an audit compares. Blocking;
`audit.py` makes the calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from connectors.replays import Generated, NotReplayable, completion_body, read_generated, read_replay, replay_body
from router.core.finished import REPLAY_HEADER

CALL_TIMEOUT_S = 300.0
SHOWN = 300
"""Characters of an unexpected answer that a reason repeats."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A reply, all of it made in one epoch."""

    reply: bytes
    epoch: int
    version: str
    replicas: Mapping[str, str]
    """By part: prefill, decode."""


class ReplayClient:
    """Every method raises `NotReplayable` where a request is not served as it should be, and httpx's errors where the
    router does not answer."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._http = httpx.Client(
            base_url=url, timeout=CALL_TIMEOUT_S, trust_env=False, verify=url.startswith("https:")
        )

    def __enter__(self) -> ReplayClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def complete(self, prompt: tuple[int, ...], salt: str, tokens: int) -> tuple[Completed, Generated]:
        """A greedy completion, in a session of its own."""
        body = completion_body(self._model, prompt, salt, tokens)
        completed = self._ask(body, session=None)
        return completed, read_generated(body, completed.reply)

    def replay(self, given: Generated, epoch: int, tokens: int, runs: int) -> list[tuple[float, ...]]:
        """The log-probabilities that the first `tokens` of `given` get after its prompt, in so many runs of this epoch.

        The first computes everything, for nobody had its salt before. The others find what it has left, on the same
        engines.
        """
        salt = one_off()
        wanted = given.tokens[:tokens]
        found = [self._run(given.prompt, wanted, epoch, salt) for _ in range(runs)]
        self._http.post("/finish_session", json={"session_id": salt})
        return found

    def _run(self, prompt: tuple[int, ...], wanted: tuple[int, ...], epoch: int, salt: str) -> tuple[float, ...]:
        """Where the engine goes on with another token, it is asked again with the one that was given."""
        found: tuple[float, ...] = ()
        while len(found) < len(wanted):
            had, left = wanted[: len(found)], wanted[len(found) :]
            completed = self._ask(replay_body(self._model, prompt + had, left, salt), session=salt)
            if completed.epoch != epoch:
                raise NotReplayable(f"its epoch {epoch} has gone: a replay ran in {completed.epoch}")
            scores = read_replay(completed.reply, left)
            if not scores:
                raise NotReplayable("the engine does not tell the log-probability of a token that it did not choose")
            found += scores
        return found

    def _ask(self, body: Mapping[str, Any], session: str | None) -> Completed:
        headers = {REPLAY_HEADER: "true"} | ({} if session is None else {"x-session-id": session})
        reply = self._http.post("/v1/completions", json=body, headers=headers)
        if not reply.is_success:
            raise NotReplayable(f"the router answered {reply.status_code}: {reply.text[:SHOWN]}")
        label = reply.json()["headrace"]
        if not label["single_version"]:
            raise NotReplayable("weights changed while it was replayed")
        return Completed(
            reply=reply.content,
            epoch=label["epochs"][0],
            version=label["weight_versions"][0],
            replicas={part: label[part] for part in ("prefill", "decode") if label[part]},
        )


def one_off() -> str:
    """A cache salt that nobody has used before."""
    return f"audit-{secrets.token_hex(16)}"
