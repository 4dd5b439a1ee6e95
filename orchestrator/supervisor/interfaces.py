"""What the supervisor's loop needs from outside; `orchestrator/compose.py` chooses the implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from connectors.engine_client import CacheConfig, CommandOrder
from deploy.probe import ProbeResult
from deploy.unit import Probe
from orchestrator.plan.types import EnginePlan, RouterPlan
from orchestrator.supervisor.startup_checks import OffloadProbe
from orchestrator.supervisor.state import UnitState


@dataclass(frozen=True, kw_only=True)
class UnitProgress:
    """One unit as shown to a user."""

    name: str
    state: UnitState
    seconds: float
    """Since it was started; until it was ready, once it was."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A start as shown to a user."""

    units: tuple[UnitProgress, ...]
    now_doing: str
    """What is awaited, in words."""


class ReadinessProbe(Protocol):
    def __call__(self, probe: Probe, members: Sequence[int]) -> ProbeResult: ...


@dataclass(frozen=True, kw_only=True)
class ServingEpoch:
    """What a fleet serves under: an epoch that every engine has confirmed."""

    epoch: int
    version: str
    """Of the weights, as the trainer names them."""
    instances: Mapping[str, str]
    """The life of each engine that confirmed it, by the engine's name."""
    order: CommandOrder


class EngineQuestions(Protocol):
    def cache_configs(self, engines: Sequence[EnginePlan]) -> Mapping[str, CacheConfig]: ...

    def confirm_epoch(self, engine: EnginePlan, epoch: int, order: CommandOrder) -> str:
        """Open an engine's fence for an epoch; returns its instance.

        Raises:
            FenceFailed: the engine has no fence, or did not confirm.
        """
        ...

    def probe_offload(self, engine: EnginePlan, model: str, salt: str) -> OffloadProbe: ...


class Gate(Protocol):
    def open(self, router: RouterPlan, serving: ServingEpoch) -> None:
        """Tell the router what the engines serve under, and let it send requests.

        Raises:
            GateFailed: the router did not confirm.
        """
        ...


class ProgressSink(Protocol):
    def __call__(self, progress: Progress) -> None: ...


class GateFailed(Exception):
    """The router did not confirm that its gate moved."""


class FenceFailed(Exception):
    """An engine did not confirm its epoch; the text names it."""
