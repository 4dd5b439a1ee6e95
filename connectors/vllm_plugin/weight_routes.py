"""The fence's routes about weights, and its guard around vLLM's own: sends commands to the ranks, believes what they
agree on.

`fence.py` hands requests over, `weight_rules.py` decides, `weights/` is the other end in the workers. Before weights
change, the engine leaves its epoch in the pool. Standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from connectors.vllm_plugin.fence_rules import Answer, CommandInvalid, FenceState, Order, error_answer
from connectors.vllm_plugin.pool_epoch import PoolEpoch
from connectors.vllm_plugin.rank_calls import ask_ranks, call_name, has_extension, rank_count
from connectors.vllm_plugin.weight_rules import (
    apply_verdict,
    load_refusal,
    read_request,
    route_name,
    session_error,
    verdict_answer,
)
from connectors.vllm_plugin.weights.settings import BACKEND, WORKER_EXTENSION
from connectors.vllm_plugin.weights.verdict import EngineVerdict, WeightCommand

Forward = Callable[[], Awaitable[Answer]]
"""Lets vLLM's own route answer, whole."""

RANK_MARGIN_S = 120.0
"""Ranks bound their work themselves; past this on top of it one of them is stuck for good."""

_log = logging.getLogger("vllm.headrace.fence")


class WeightRoutes:
    """Of one engine; one command at a time."""

    def __init__(self, state: FenceState, pool: PoolEpoch) -> None:
        self._state = state
        self._pool = pool
        self._last: tuple[Order, bytes, Answer] | None = None
        """Order, body and answer of the last command: who repeats it gets the same answer."""
        self._last_verdict: EngineVerdict | None = None

    async def own(self, app: Any, method: str, path: str, body: bytes) -> Answer:
        """Answer a request under /weights/."""
        name = route_name(method, path)
        if name is None:
            return error_answer(404, "invalid_request_error", f"there is no {method} {path}")
        client = app.state.engine_client
        if refusal := _without_extension(client):
            return refusal
        if name == "state":
            return await self._state_answer(client)
        try:
            request = read_request(name, body, call_name())
        except CommandInvalid as error:
            return error_answer(400, "invalid_request_error", str(error), param=error.field)
        command = request.command
        assert command.order is not None
        if conflict := self._state.conflict(request.instance, command.order):
            return conflict
        if self._last is not None and self._last[0] == command.order:
            if self._last[1] == path.encode() + body:
                return self._last[2]
            return error_answer(409, "conflict", f"another command had the order {list(command.order)}", param="step")
        if refusal := self._busy() or (load_refusal(self._state) if name == "load" else None):
            return refusal
        self._state.order = command.order
        answer = await (self._load(client, command) if name == "load" else self._plain(client, command))
        self._last = (command.order, path.encode() + body, answer)
        return answer

    async def vllm(self, app: Any, path: str, forward: Forward) -> Answer:
        """Answer one of vLLM's own routes that can change weights, with vLLM's answer where it can be believed."""
        client = app.state.engine_client
        if refusal := self._busy():
            return refusal
        if self._state.lost:
            return error_answer(503, "fenced", self._state.unfit(), param="weights")
        self._state.weights_command = path
        try:
            return await self._guarded(client, path, forward)
        finally:
            self._state.weights_command = ""

    async def _guarded(self, client: Any, path: str, forward: Forward) -> Answer:
        is_ours = _backend(client) == BACKEND and not _without_extension(client)
        if path in ("/start_weight_update", "/update_weights"):
            if refusal := load_refusal(self._state):
                return refusal
            # At both: an epoch can have been confirmed between them.
            self._state.epoch = None
            if problem := await self._pool.move(client, None):
                return error_answer(500, "weight_update_failed", problem, param="pool")
        if path == "/start_weight_update" and is_ours:
            # One that was started and never finished must not stand in the way.
            await self._ask(client, WeightCommand(name="reset", call=call_name()))
        elif path == "/finish_weight_update" and is_ours and (failed := await self._session_failure(client)):
            return failed
        try:
            answer = await forward()
        except Exception:
            self._rank_raised(client, path)
            raise
        if answer.status >= 500:
            self._rank_raised(client, path)
        if answer.status < 300 and is_ours:
            if path == "/update_weights":
                failed = await self._session_failure(client)
                assert self._last_verdict is not None
                self._note(self._last_verdict, ok=failed is None)
                return failed or answer
            if path == "/finish_weight_update":
                await self._after_success(client, None)
                if self._state.stale:
                    return error_answer(500, "weight_update_failed", self._state.stale)
        return answer

    async def _session_failure(self, client: Any) -> Answer | None:
        verdict = await self._ask(client, WeightCommand(name="state", call=call_name()))
        error = session_error(verdict)
        if not error:
            return None
        return error_answer(500, "weight_update_failed", error, **verdict_answer(self._state, verdict).content)

    async def _state_answer(self, client: Any) -> Answer:
        if self._state.weights_command:
            # The ranks answer between two commands; meanwhile this is what they said last.
            last = self._last_verdict or EngineVerdict(ok=True, error="", torn="", lost="", reports=())
            return verdict_answer(self._state, last, running=self._state.weights_command)
        verdict = await self._ask(client, WeightCommand(name="state", call=call_name()))
        answer = verdict_answer(self._state, verdict, running="")
        return Answer(200, answer.content)

    async def _plain(self, client: Any, command: WeightCommand) -> Answer:
        self._state.weights_command = command.name
        try:
            return verdict_answer(self._state, await self._ask(client, command))
        finally:
            self._state.weights_command = ""

    async def _load(self, client: Any, command: WeightCommand) -> Answer:
        self._state.weights_command = command.name
        before, self._state.epoch = self._state.epoch, None
        try:
            problem = await self._pool.move(client, None)
            verdict = _unmoved(problem, self._state.lost) if problem else await self._ask(client, command)
            if verdict.ok:
                await self._after_success(client, command.source["version"])
                verdict = replace(verdict, ok=not self._state.stale, error=self._state.stale)
            elif not self._state.unfit() and self._state.order == command.order:
                # The old weights are whole on every rank: what was confirmed for them still holds, unless it is
                # withdrawn meanwhile.
                if not await self._pool.move(client, before) and self._state.order == command.order:
                    self._state.epoch = before
        finally:
            self._state.weights_command = ""
        self._note(verdict, ok=verdict.ok)
        _log.info("fence: load of %s: %s", command.source["version"], verdict.error or "done")
        return verdict_answer(self._state, verdict)

    async def _after_success(self, client: Any, version: str | None) -> None:
        """What was computed under the old weights and is kept by content goes; then the version moves."""
        self._state.stale = ""
        try:
            await client.reset_mm_cache()
            if hasattr(client, "reset_encoder_cache"):
                await client.reset_encoder_cache()
            if version is not None and hasattr(client, "update_weight_version"):
                await client.update_weight_version(version)
        except Exception as error:
            self._state.stale = f"caches of the old weights could not be emptied: {type(error).__name__}: {error}"

    async def _ask(self, client: Any, command: WeightCommand) -> EngineVerdict:
        limit_s = command.limit_s + 2 * command.timeout_s + RANK_MARGIN_S
        verdict = await ask_ranks(client, "headrace_weights", command.call, (command.to_wire(),), limit_s)
        self._last_verdict = verdict
        apply_verdict(self._state, verdict)
        return verdict

    def _rank_raised(self, client: Any, path: str) -> None:
        if rank_count(client) > 1:
            self._state.lost = f"{path} raised in a rank, so later answers of the ranks are shifted"

    def _note(self, verdict: EngineVerdict, *, ok: bool) -> None:
        # Imported here: a fence starts before vLLM has set its metrics up.
        from connectors.vllm_plugin.weight_metrics import weight_metrics

        weight_metrics().loaded(verdict.reports, ok=ok, unfit=bool(self._state.unfit()))

    def _busy(self) -> Answer | None:
        if not self._state.weights_command:
            return None
        return error_answer(409, "conflict", f"{self._state.weights_command} is running", param="running")


def _unmoved(problem: str, lost: str) -> EngineVerdict:
    """Of a load that was not begun."""
    return EngineVerdict(ok=False, error=problem, torn="", lost=lost, reports=())


def _backend(client: Any) -> str | None:
    config = client.vllm_config.weight_transfer_config
    return None if config is None else str(config.backend)


def _without_extension(client: Any) -> Answer | None:
    if has_extension(client):
        return None
    message = f"the engine was started without --worker-extension-cls {WORKER_EXTENSION}"
    return error_answer(501, "not_implemented", message)
