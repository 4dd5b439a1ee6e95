"""How this engine takes weights: one environment variable, read once by every worker. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, get_args

SETTINGS_VARIABLE = "HEADRACE_WEIGHTS"
"""Environment variable with a JSON object of `WeightSettings`' fields."""

BACKEND = "headrace"
"""Of vLLM's weight transfer config."""
WORKER_EXTENSION = "connectors.vllm_plugin.weights.extension.WorkerExtension"
"""Of vLLM's `--worker-extension-cls`."""

LoadMode = Literal["gpu_fetch", "cpu_prefetch"]


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """Of one engine."""

    mode: LoadMode = "gpu_fetch"
    """`gpu_fetch`: straight into the parameters, no host memory. `cpu_prefetch`: into host memory while the engine
    generates, from there into the parameters."""
    keep_copy: bool = False
    """Whether `cpu_prefetch` keeps its copy in host memory: the next prefetch needs not pin memory again, and an
    engine whose parameters are packed can serve them to peers."""
    host: str = "127.0.0.1"
    """Address by which peers and sources reach this machine."""
    sources: tuple[Mapping[str, Any], ...] = ()
    """What is known of later sources: `transport`, and for `store` the volume's `master` and `protocol`. The engine
    gets ready for them when it starts: no first load waits for libraries and connections, or takes memory for them."""
    fetch_cores: tuple[int, ...] = ()
    """CPU cores for the prefetching thread and what a transport starts there; none: those of the engine."""

    prefetch_share: float | None = None
    """Part of the time in which a prefetch reads; a load that waits for it makes it read all the time. None: all of it
    beside a GPU; a twentieth on a CPU, where the engine needs the memory's bandwidth for every token."""

    def __post_init__(self) -> None:
        share = self.prefetch_share
        for name, fits, needed in (
            ("mode", self.mode in get_args(LoadMode), f"one of {', '.join(get_args(LoadMode))}"),
            ("keep_copy", isinstance(self.keep_copy, bool), "true or false"),
            ("host", isinstance(self.host, str) and self.host, "an address"),
            ("sources", _all(self.sources, Mapping), "a list of objects"),
            ("fetch_cores", _all(self.fetch_cores, int), "a list of numbers of cores"),
            ("prefetch_share", share is None or (_all((share,), int | float) and 0 < share <= 1), "in (0, 1]"),
        ):
            if not fits:
                raise ValueError(f"{SETTINGS_VARIABLE}: {name} must be {needed}, not {getattr(self, name)!r}")


def _all(values: object, kind: type | UnionType) -> bool:
    """JSON's true and false are no numbers."""
    return isinstance(values, tuple) and all(isinstance(each, kind) and not isinstance(each, bool) for each in values)


def read_settings(environment: Mapping[str, str]) -> WeightSettings:
    """Raises ValueError that names what is wrong."""
    text = environment.get(SETTINGS_VARIABLE)
    if not text:
        return WeightSettings()
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{SETTINGS_VARIABLE} is not JSON: {error}") from error
    known = {each.name for each in fields(WeightSettings)}
    if not isinstance(given, dict) or given.keys() - known:
        raise ValueError(f"{SETTINGS_VARIABLE} must be a JSON object with fields of {', '.join(sorted(known))}")
    frozen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return WeightSettings(**frozen)
