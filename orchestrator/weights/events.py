"""What can happen to an update. The shell makes these of answers, time-outs, the supervisor's news and its timer."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.weights.words import EngineFacts, Order, RouterFacts, Update


@dataclass(frozen=True, kw_only=True)
class UpdateAsked:
    update: Update


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """Somebody no longer wants this update."""

    update: int


@dataclass(frozen=True, kw_only=True)
class Ticked:
    """The time that `Coordinator.wake_at` named has come; also the first event of a machine."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A command was answered: with success, or with a refusal that `error` tells."""

    order: Order
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class OutcomeLost:
    """Nobody knows whether a command was carried out: no answer, or none that can be believed."""

    order: Order


@dataclass(frozen=True, kw_only=True)
class EngineRead:
    order: Order
    facts: EngineFacts


@dataclass(frozen=True, kw_only=True)
class RouterRead:
    order: Order
    facts: RouterFacts


@dataclass(frozen=True, kw_only=True)
class EngineEnded:
    """The supervisor saw this life of the engine end."""

    name: str


@dataclass(frozen=True, kw_only=True)
class EngineAwaited:
    """The engine is to be there and is not yet: its first life is still to come."""

    name: str


@dataclass(frozen=True, kw_only=True)
class EngineCameUp:
    """A life of the engine answers, healthy and fenced."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Withdrawn:
    """Which engines somebody wants without requests now. All others are wanted, also those withdrawn before."""

    names: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class RouterCameUp:
    """Another life of the router: its gate is frozen, and it knows no epochs."""


Event = (
    UpdateAsked
    | Cancelled
    | Ticked
    | Answered
    | OutcomeLost
    | EngineRead
    | RouterRead
    | EngineEnded
    | EngineAwaited
    | EngineCameUp
    | Withdrawn
    | RouterCameUp
)
