"""What the machine can ask for. The shell carries acts out in their order, and a `Record` before all that follow it.

Commands have a receiver (an engine's name, the router, the pool or the trainer) and an order; exactly one event with
that order answers each. A receiver has at most one command open. `Record`, `Restart`, `Say` and `Finish` are answered
by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.spec.weights import InFlightMode
from orchestrator.weights.words import Ended, Order, Position
from router.core.gate import GateState

ROUTER = "the router"
POOL = "the pool"
TRAINER = "the trainer"
"""Receivers beside the engines. An engine's name has no blanks."""


@dataclass(frozen=True, kw_only=True)
class ReadEngine:
    """Its fence, its weights and whether it is paused."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Answered when the copy is whole, or when a rank could not get it."""

    instance: str
    source: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pause:
    """With clear_cache false: caches of older epochs are never hit, and wiping is no engine's business."""

    instance: str
    drops_handoffs: bool
    """No leg is left that could read a handoff of this engine."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Let peers read its weights, until it loads others."""

    instance: str


@dataclass(frozen=True, kw_only=True)
class Load:
    instance: str
    source: Mapping[str, Any]
    peer: str
    """The engine whose weights the source is; empty for the source that came with the version."""
    mode: LoadMode
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class ConfirmEpoch:
    """Open the engine's fence for requests of this epoch; None closes it."""

    instance: str
    epoch: int | None


@dataclass(frozen=True, kw_only=True)
class Resume:
    instance: str


@dataclass(frozen=True, kw_only=True)
class ReadRouter:
    """Its gate and its replicas."""


@dataclass(frozen=True, kw_only=True)
class SetGate:
    gate: GateState
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class HandleInFlight:
    mode: InFlightMode
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Drain:
    """No new legs for this replica; answered with success when it has none left. False: it gets legs again."""

    name: str
    draining: bool
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Introduce:
    """The router does not know this replica yet."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Dismiss:
    """The job has this replica no more."""

    name: str


@dataclass(frozen=True, kw_only=True)
class PublishEpoch:
    """These lives of replicas hold this version, confirmed for this epoch."""

    epoch: int
    version: str
    committed: int
    """The epoch that is committed now. Others that were published since were given up."""
    instances: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Purge:
    """Remove an epoch's keys, by prefix and by force."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class Wipe:
    """Remove every key of the pool, by force."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """No engine needs this version from its own source any more: the memory that it lies in may be written to."""

    source: Mapping[str, Any]


EngineAsk = ReadEngine | Prefetch | Pause | Serve | Load | ConfirmEpoch | Resume
RouterAsk = ReadRouter | SetGate | HandleInFlight | Drain | Introduce | Dismiss | PublishEpoch
PoolAsk = Purge | Wipe
Ask = EngineAsk | RouterAsk | PoolAsk | Release


@dataclass(frozen=True, kw_only=True)
class Command:
    receiver: str
    order: Order
    ask: Ask


@dataclass(frozen=True, kw_only=True)
class Record:
    """Write to the journal, durably, before the next act."""

    position: Position


@dataclass(frozen=True, kw_only=True)
class Restart:
    """End whatever life the engine now has, and start another."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Say:
    """Something a person should know: a step that must succeed does not."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    ended: Ended


Act = Record | Command | Restart | Say | Finish
