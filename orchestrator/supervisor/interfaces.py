"""What starting and watching a job needs from outside; `orchestrator/compose.py` chooses the implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from connectors.engine_client import CacheConfig
from deploy.probe import ProbeResult
from deploy.unit import Probe
from orchestrator.plan.types import EnginePlan, RouterPlan
from orchestrator.store.records import StoredJob
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


class EngineQuestions(Protocol):
    def cache_configs(self, engines: Sequence[EnginePlan]) -> Mapping[str, CacheConfig]: ...

    def probe_offload(self, engine: EnginePlan, model: str, salt: str) -> OffloadProbe:
        """Of an engine that nothing is routed to; it stays so."""
        ...


class Opening(Protocol):
    def __call__(self, job: StoredJob) -> None:
        """Make the engines of a job whose processes are ready routable, and open its router's gate.

        Raises:
            JobFailed: one of them does not do its part.
        """
        ...


class LetRequestsEnd(Protocol):
    def __call__(self, router: RouterPlan, is_wanted: Callable[[], bool]) -> None:
        """Start no new requests of clients; return when no open one is left, when that is no longer wanted, or where
        the router does not do it."""
        ...


class ProgressSink(Protocol):
    def __call__(self, progress: Progress) -> None: ...
