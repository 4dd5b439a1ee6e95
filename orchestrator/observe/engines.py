"""Asks running engines what only they can tell, which `supervisor/startup_checks.py` judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from connectors.engine_client import (
    CLEAR_EVERY_S,
    EXTERNAL_HITS,
    SMALLEST_VOCABULARY,
    CacheConfig,
    EngineCallFailed,
    EngineClient,
    FenceView,
)
from orchestrator.plan.types import EnginePlan
from orchestrator.supervisor.startup_checks import OffloadProbe

PROBE_CALL_TIMEOUT_S = 300.0
"""A first request may compile; on a small CPU that takes tens of seconds."""
SETTLE_S = 60.0
"""How long an engine may take to save a short prompt before the probe gives up."""
PROBE_EPOCH = 0
"""Nothing else is ever computed in it: a job's first is 1."""


class RunningEngines:
    """A starter's `EngineQuestions`, asked over HTTP."""

    def cache_configs(self, engines: Sequence[EnginePlan]) -> dict[str, CacheConfig]:
        """What each engine reports; one that does not report is left out."""
        reported: dict[str, CacheConfig] = {}
        for engine in engines:
            try:
                with EngineClient(engine.url, engine.token_file) as client:
                    reported[engine.name] = client.cache_config()
            except EngineCallFailed:
                continue
        return reported

    def probe_offload(self, engine: EnginePlan, model: str, salt: str) -> OffloadProbe:
        """Send a prompt of a little over two blocks twice, the engine's own cache cleared in between (A21). Where the
        engine's fence is closed, it is open for the probe alone."""
        tokens = 0
        try:
            with EngineClient(engine.url, engine.token_file, timeout_s=PROBE_CALL_TIMEOUT_S) as client:
                tokens = 2 * client.cache_config().block_size + 2
                prompt = [(index * 7 + 3) % SMALLEST_VOCABULARY + 1 for index in range(tokens)]
                with _opened(client) as fence:
                    client.complete(fence, model, prompt, salt)
                    hits = _hits_once_cleared(client, lambda: client.complete(fence, model, prompt, salt))
        except EngineCallFailed as error:
            return OffloadProbe(engine=engine.name, prompt_tokens=tokens, external_hit_tokens=0, problem=str(error))
        return OffloadProbe(engine=engine.name, prompt_tokens=tokens, external_hit_tokens=hits)


@contextmanager
def _opened(client: EngineClient) -> Iterator[FenceView]:
    """Its commands follow whatever the engine was told last. Whoever joins it to an epoch afterwards is newer again."""
    fence = client.fence()
    if fence.epoch is not None:
        yield fence
        return
    opened = client.confirm_epoch(fence.instance, PROBE_EPOCH, fence.next_order())
    try:
        yield opened
    finally:
        client.confirm_epoch(opened.instance, None, opened.next_order())


def _hits_once_cleared(client: EngineClient, ask_again: Callable[[], object]) -> float:
    """Pool hits of a second asking, after the engine's own cache was cleared.

    A clearing is refused while a save still holds blocks, so its success says that the save is over. Where success
    cannot be told from refusal, only hits can: it is asked again until there are some, or time is up.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        cleared = client.reset_local_cache()
        if cleared is not False:
            before = client.counter(EXTERNAL_HITS)
            ask_again()
            hits = client.counter(EXTERNAL_HITS) - before
            if cleared or hits > 0:
                return hits
        if time.monotonic() > deadline:
            if cleared is None:
                return 0.0
            raise EngineCallFailed(f"its own cache could not be cleared within {SETTLE_S:.0f} s")
        time.sleep(CLEAR_EVERY_S)
