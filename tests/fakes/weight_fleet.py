"""Small models of engines and a router: what their commands do, and what must never be asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from connectors.types import Role
from orchestrator.weights import acts
from orchestrator.weights.words import EngineFacts, Order, ReplicaFacts, RouterFacts
from router.core.gate import GateState

OVERTAKEN = "overtaken"
NEVER = Order(0, 0, 0)
LoadEnd = Literal["done", "untouched", "torn", "lost"]


class Refused(Exception):
    """The receiver answers, and does not do it."""


@dataclass
class SimEngine:
    name: str
    role: Role
    life: int = 1
    is_up: bool = True
    weights: str = "v0"
    """What really is in the parameters."""
    version: str = "v0"
    """What it says of them."""
    epoch: int | None = 1
    unfit: str = ""
    lost: bool = False
    paused: bool = False
    running: bool = False
    """A request is being computed."""
    load: acts.Load | None = None
    """Under way."""
    serves: bool = False
    """Its weights, to peers."""
    epoch_before: int | None = None
    order: Order = NEVER

    @property
    def instance(self) -> str:
        return f"{self.name}-{self.life}"

    def end(self) -> None:
        self.is_up = self.paused = self.running = False
        self.load, self.epoch, self.serves = None, None, False

    def boot(self) -> None:
        self.life += 1
        self.is_up, self.weights, self.version, self.epoch = True, "disk", "disk", None
        self.unfit, self.lost = "", False
        self.order = NEVER

    def facts(self) -> EngineFacts:
        return EngineFacts(
            instance=self.instance,
            epoch=self.epoch,
            version=self.version,
            unfit=self.unfit,
            paused=self.paused,
            loading=self.load is not None,
            lost=self.lost,
            served={"version": self.version, "weights": self.weights} if self.serves else None,
        )

    def obey(self, command: acts.Command) -> None:
        """Raises `Refused`."""
        ask = command.ask
        assert isinstance(ask, acts.Prefetch | acts.Pause | acts.Serve | acts.Load | acts.ConfirmEpoch | acts.Resume)
        if ask.instance != self.instance:
            raise Refused("another life")
        if command.order < self.order:
            raise Refused(OVERTAKEN)
        if self.load is not None:
            raise Refused("a load is running")
        if self.lost and isinstance(ask, acts.Load):
            raise Refused("this life must end")
        if isinstance(ask, acts.ConfirmEpoch) and ask.epoch is not None and self.unfit:
            raise Refused(self.unfit)
        self.order = command.order
        match ask:
            case acts.Pause():
                self.paused = True
            case acts.Resume():
                self.paused = False
            case acts.ConfirmEpoch():
                self.epoch = ask.epoch
            case acts.Serve():
                if self.unfit:
                    raise Refused(self.unfit)
                self.serves = True
            case acts.Load():
                self.load, self.epoch_before, self.epoch, self.serves = ask, self.epoch, None, False

    def end_load(self, how: LoadEnd) -> None:
        assert self.load is not None
        source, self.load = self.load.source, None
        version = str(source["version"])
        if how == "done":
            self.weights, self.version, self.unfit = str(source.get("weights", version)), version, ""
        elif how in ("torn", "lost"):
            self.weights, self.unfit, self.lost = f"part of {version}", how, self.lost or how == "lost"
        elif not self.unfit:
            self.epoch = self.epoch_before


@dataclass
class SimRouter:
    engines: Mapping[str, SimEngine]
    gate: GateState = "open"
    order: Order = NEVER
    replicas: dict[str, ReplicaFacts] = field(default_factory=dict)

    def boot(self) -> None:
        """All legs end with the life that sent them."""
        self.gate, self.order = "frozen", NEVER
        for engine in self.engines.values():
            engine.running = False
            self.replicas[engine.name] = ReplicaFacts(instance=engine.instance, epoch=None, draining=False)

    def facts(self) -> RouterFacts:
        return RouterFacts(gate=self.gate, replicas=dict(self.replicas))

    def see(self, engine: SimEngine) -> None:
        """A probe: another life is another member, without an epoch."""
        replica = self.replicas[engine.name]
        if replica.instance != engine.instance:
            self.replicas[engine.name] = ReplicaFacts(instance=engine.instance, epoch=None, draining=False)

    def obey(self, command: acts.Command) -> None:
        """Raises `Refused`."""
        if command.order < self.order:
            raise Refused(OVERTAKEN)
        match command.ask:
            case acts.SetGate() as ask:
                self.gate = ask.gate
            case acts.HandleInFlight() as ask:
                if self.gate != "holding":
                    raise Refused("not holding")
                for engine in self.engines.values():
                    assert not (engine.paused and engine.running), "A27: an abort while paused"
                    engine.running = engine.running and ask.mode == "keep"
            case acts.Drain() as ask:
                before = self.replicas[ask.name]
                self.replicas[ask.name] = ReplicaFacts(
                    instance=before.instance, epoch=before.epoch, draining=ask.draining
                )
                if ask.draining:
                    self.engines[ask.name].running = False
            case acts.Introduce() as ask:
                instance = self.engines[ask.name].instance
                self.replicas[ask.name] = ReplicaFacts(instance=instance, epoch=None, draining=False)
            case acts.Dismiss() as ask:
                del self.replicas[ask.name]
            case acts.PublishEpoch() as ask:
                self._publish(ask)
        self.order = command.order

    def _publish(self, ask: acts.PublishEpoch) -> None:
        for name, instance in ask.instances.items():
            epoch = self.replicas[name].epoch
            if self.replicas[name].instance != instance or (epoch is not None and epoch > ask.epoch):
                raise Refused(f"{name} is another life, or in a later epoch")
        for name, instance in ask.instances.items():
            draining = self.replicas[name].draining
            self.replicas[name] = ReplicaFacts(instance=instance, epoch=ask.epoch, draining=draining)

    def serving(self) -> Iterator[tuple[SimEngine, int]]:
        """Engines that would take a request from this router now, and in which epoch."""
        for name, replica in self.replicas.items():
            engine = self.engines[name]
            is_sent = self.gate == "open" and not replica.draining
            is_taken = engine.is_up and not engine.paused and not engine.unfit
            named = (replica.instance, replica.epoch) == (engine.instance, engine.epoch)
            if is_sent and is_taken and named and engine.epoch is not None:
                yield engine, engine.epoch

    def has_pair(self) -> bool:
        roles: dict[int, set[Role]] = {}
        for engine, epoch in self.serving():
            roles.setdefault(epoch, set()).add(engine.role)
        return any("colocated" in each or {"prefill", "decode"} <= each for each in roles.values())
