"""Asks running engines what only they can tell; `supervisor/startup_checks.py` judges the answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from connectors.engine_client import EXTERNAL_HITS, CacheConfig, EngineCallFailed, EngineClient
from orchestrator.plan.types import EnginePlan
from orchestrator.supervisor.startup_checks import OffloadProbe

PROBE_CALL_TIMEOUT_S = 300.0
"""A first request may compile; on a small CPU that takes tens of seconds."""
SETTLE_S = 60.0
"""How long an engine may take to save a short prompt before the probe gives up."""
SMALLEST_VOCABULARY = 200


class RunningEngines:
    """The supervisor's `EngineQuestions`, asked over HTTP."""

    def cache_configs(self, engines: Sequence[EnginePlan]) -> dict[str, CacheConfig]:
        """What each engine reports; one that does not report is left out."""
        reported: dict[str, CacheConfig] = {}
        for engine in engines:
            with EngineClient(engine.url) as client:
                try:
                    reported[engine.name] = client.cache_config()
                except EngineCallFailed:
                    continue
        return reported

    def probe_offload(self, engine: EnginePlan, model: str, salt: str) -> OffloadProbe:
        """Send a prompt of a little over two blocks twice, the engine's own cache cleared in between (A21)."""
        tokens = 0
        try:
            with EngineClient(engine.url, timeout_s=PROBE_CALL_TIMEOUT_S) as client:
                tokens = 2 * client.cache_config().block_size + 2
                prompt = [(index * 7 + 3) % SMALLEST_VOCABULARY + 1 for index in range(tokens)]
                client.complete(model, prompt, salt)
                _clear_when_saved(client)
                before = client.counter(EXTERNAL_HITS)
                client.complete(model, prompt, salt)
                hits = client.counter(EXTERNAL_HITS) - before
        except EngineCallFailed as error:
            return OffloadProbe(engine=engine.name, prompt_tokens=tokens, external_hit_tokens=0, problem=str(error))
        return OffloadProbe(engine=engine.name, prompt_tokens=tokens, external_hit_tokens=hits)


def _clear_when_saved(client: EngineClient) -> None:
    """A local reset is refused while a save still holds blocks, so its success says that the save is over."""
    deadline = time.monotonic() + SETTLE_S
    while not client.reset_local_cache():
        if time.monotonic() > deadline:
            raise EngineCallFailed(f"its own cache could not be cleared within {SETTLE_S:.0f} s")
        time.sleep(0.2)
