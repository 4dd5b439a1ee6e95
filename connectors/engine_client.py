"""An engine's control routes, as far as the control plane needs them. Blocking; one client per engine.

The data plane has its own client (`router/io/upstream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import httpx
from prometheus_client.parser import text_string_to_metric_families

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
"""Prompt tokens that came from a connector instead of being computed."""


class EngineCallFailed(Exception):
    """The engine did not answer, or not with success; the text says which route and what came."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """vllm:cache_config_info: what an engine made of the KV settings it was given."""

    block_size: int
    cache_dtype: str


class EngineClient:
    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        self._url = url
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def cache_config(self) -> CacheConfig:
        """What the engine reports of its KV cache.

        Raises:
            EngineCallFailed: no answer, or none that reports it.
        """
        for family in text_string_to_metric_families(self._get_text("/metrics")):
            for sample in family.samples:
                if sample.name == "vllm:cache_config_info":
                    labels = sample.labels
                    return CacheConfig(block_size=int(labels["block_size"]), cache_dtype=labels["cache_dtype"])
        raise EngineCallFailed(f"{self._url}/metrics has no vllm:cache_config_info")

    def counter(self, name: str) -> float:
        """Sum of a counter over its label sets; 0 where the engine has not counted yet. `name` without "_total"."""
        families = text_string_to_metric_families(self._get_text("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"{name}_total")

    def reset_local_cache(self) -> bool:
        """Clear the engine's own prefix cache and nothing of the pool. False: refused while blocks are held; retry."""
        reply = self._post("/reset_prefix_cache", params={"reset_external": "false"})
        try:
            return bool(reply.json().get("success", True))
        except ValueError:
            return True

    def complete(self, model: str, prompt: Sequence[int], cache_salt: str) -> int:
        """Compute one token after `prompt` (token ids). Returns the prompt tokens that were cached.

        Raises:
            EngineCallFailed: no answer, or an error.
        """
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": cache_salt,
        }
        usage = self._post("/v1/completions", json=body).json().get("usage") or {}
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _get_text(self, path: str) -> str:
        try:
            return self._http.get(path).raise_for_status().text
        except httpx.HTTPError as error:
            raise EngineCallFailed(f"GET {self._url}{path}: {error}") from error

    def _post(self, path: str, *, json: object = None, params: dict[str, str] | None = None) -> httpx.Response:
        try:
            reply = self._http.post(path, json=json, params=params)
        except httpx.HTTPError as error:
            raise EngineCallFailed(f"POST {self._url}{path}: {error or type(error).__name__}") from error
        if reply.is_error:
            raise EngineCallFailed(f"POST {self._url}{path} answered {reply.status_code}: {reply.text[:300]}")
        return reply
