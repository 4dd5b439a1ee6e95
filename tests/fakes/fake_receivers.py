"""Receivers of a coordinator's commands: the model engines and the model router, behind the shell's real threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from connectors.types import Role
from orchestrator.observe.outside import Outside
from orchestrator.plan.types import EnginePlan
from orchestrator.weights import acts, events
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.words import ReplicaFacts
from router.core.fleet import ReplicaView
from tests.fakes.weight_fleet import LoadEnd, Refused, SimEngine, SimRouter

ROLES: tuple[Role, ...] = ("prefill", "decode")


def pairs_of_engines(pairs: int) -> dict[str, Role]:
    return {f"{role}-{number}": role for role in ROLES for number in range(pairs)}


class FakeReceivers:
    """Boots as a job does: engines fenced, with the weights on their disk; the router frozen."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self.engines = {name: SimEngine(name, role, epoch=None) for name, role in roles.items()}
        for engine in self.engines.values():
            engine.weights = engine.version = FIRST_VERSION
        self.router = SimRouter(self.engines, gate="frozen")
        for name, engine in self.engines.items():
            self.router.replicas[name] = ReplicaFacts(instance=engine.instance, epoch=None, draining=False)
        self.purged: list[int] = []
        self.load_ends: dict[str, LoadEnd] = {}
        self.silent: set[str] = set()
        """Receivers whose answers get lost."""
        self.commands: list[acts.Command] = []
        self.legs: dict[str, int] = {}
        """In flight, by replica, as the router says."""
        self.handoffs_failed: dict[str, int] = {}
        self.segments: frozenset[tuple[str, int]] | None = None
        self.settled: list[str] = []
        """Prefill engines that were paused to be restarted."""
        self._one_at_a_time = threading.Lock()

    def not_ready(self) -> str | None:
        return None if self.router.has_pair() else "no pair serves"

    def outside(self) -> Outside:
        with self._one_at_a_time:
            return Outside(replicas={name: self._view(name) for name in self.router.replicas}, segments=self.segments)

    def let_handoffs_end(self, engine: EnginePlan, limit_s: float) -> None:
        assert limit_s > 0
        assert self.router.replicas[engine.name].draining
        self.settled.append(engine.name)

    def _view(self, name: str) -> ReplicaView:
        facts, engine = self.router.replicas[name], self.engines[name]
        return ReplicaView(
            name=name,
            role=engine.role,
            url="",
            instance=facts.instance,
            epoch=facts.epoch,
            usable=engine.is_up and facts.epoch is not None and not facts.draining,
            draining=facts.draining,
            breaker="closed",
            active_sessions=0,
            legs_in_flight=self.legs.get(name, 0),
            tokens_in_flight=0,
            handoffs_failed=self.handoffs_failed.get(name, 0),
        )

    def add(self, name: str, role: Role) -> None:
        """A first life, which the router has not heard of."""
        with self._one_at_a_time:
            self.engines[name] = engine = SimEngine(name, role, epoch=None)
            engine.weights = engine.version = FIRST_VERSION

    def boot(self, name: str) -> None:
        """Another life, behind the same port."""
        with self._one_at_a_time:
            engine = self.engines[name]
            engine.end()
            engine.boot()
            engine.weights = engine.version = FIRST_VERSION
            self.router.see(engine)

    def carry_out(self, command: acts.Command) -> events.Event:
        with self._one_at_a_time:
            self.commands.append(command)
            try:
                answer = self._obeyed(command)
            except Refused as refused:
                return events.Answered(order=command.order, error=str(refused))
            return events.OutcomeLost(order=command.order) if command.receiver in self.silent else answer

    def _obeyed(self, command: acts.Command) -> events.Event:
        """Raises `Refused`."""
        if command.receiver == acts.POOL:
            assert isinstance(command.ask, acts.Purge)
            self.purged.append(command.ask.epoch)
        elif command.receiver == acts.ROUTER:
            if isinstance(command.ask, acts.ReadRouter):
                return events.RouterRead(order=command.order, facts=self.router.facts())
            self.router.obey(command)
        else:
            engine = self.engines[command.receiver]
            if isinstance(command.ask, acts.ReadEngine):
                return events.EngineRead(order=command.order, facts=engine.facts())
            engine.obey(command)
            if isinstance(command.ask, acts.Load):
                how = self.load_ends.get(engine.name, "done")
                engine.end_load(how)
                if how != "done":
                    return events.Answered(order=command.order, error=f"{how}: no bytes")
        return events.Answered(order=command.order)
