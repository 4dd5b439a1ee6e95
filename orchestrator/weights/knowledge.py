"""What a machine knows beside its journal: forgotten when the control plane dies, and read back.

`needs.py` asks it, `machine.py` keeps it up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from orchestrator.weights.acts import (
    ROUTER,
    Ask,
    ConfirmEpoch,
    Dismiss,
    Drain,
    Introduce,
    Load,
    Pause,
    Prefetch,
    PublishEpoch,
    Resume,
    Serve,
    SetGate,
)
from orchestrator.weights.groups import serving
from orchestrator.weights.words import Commitment, Course, EngineFacts, Fleet, Position, ReplicaFacts, RouterFacts


@dataclass
class Knowledge:
    fleet: Fleet
    wipes_pool: bool
    """Epochs have no keys of their own in the pool: a barrier wipes it."""
    position: Position
    engines: dict[str, EngineFacts | None]
    """None: to be read back."""
    router: RouterFacts | None = None
    away: set[str] = field(default_factory=set)
    """Engines that are being restarted."""
    withdrawn: frozenset[str] = frozenset()
    """Engines that somebody wants without requests. They are left alone, and join again once they are wanted."""
    answered: set[str] = field(default_factory=set)
    """Whose success in this phase was answered, where only an answer proves it."""
    sealed: set[str] = field(default_factory=set)
    """Engines that have answered a pause of this attempt, and the router if it has answered a command. What an older
    attempt sent and is still under way to one comes too late now; so what is read from here on is how it is."""
    failed: dict[str, str] = field(default_factory=dict)
    """Who refused the load (or prefetch) of this phase, and why."""
    asked: set[str] = field(default_factory=set)
    """Who has answered in this phase whether it serves its weights to peers."""

    @property
    def course(self) -> Course:
        assert self.position.course is not None
        return self.position.course

    @property
    def target(self) -> Commitment:
        """What the engines are led to."""
        course, update = self.course, self.course.update
        if course.going == "forward":
            return Commitment(epoch=course.epoch, version=update.version, source=update.source)
        return replace(self.position.committed, epoch=course.epoch)

    def wanted(self) -> list[str]:
        return [name for name in self.fleet if name not in self.withdrawn]

    def present(self) -> list[str]:
        return [name for name in self.wanted() if name not in self.away]

    def movers(self) -> list[str]:
        """Who the present phase is about."""
        course = self.course
        is_about_all = course.update.strategy == "barrier" or course.phase == "prefetch"
        return [name for name in self.present() if is_about_all or name in course.group]

    def known(self) -> Iterator[tuple[str, EngineFacts]]:
        for name in self.present():
            engine = self.engines[name]
            if engine is not None:
                yield name, engine

    def held_version(self, engine: EngineFacts) -> str | None:
        """Whose weights are in its parameters, whole and on all ranks; None where nobody can say."""
        return None if engine.unfit or engine.loading else engine.version

    def holders(self) -> list[str]:
        """Engines with the target's weights, of whatever epoch."""
        return [name for name, engine in self.known() if self.held_version(engine) == self.target.version]

    def lacking_load(self) -> list[str]:
        """Who moves now, does not hold the target, and has not refused to load it."""
        done = {*self.holders(), *self.failed}
        return [name for name in self.movers() if name not in done]

    def confirmed(self) -> dict[str, str]:
        """Engines that hold the target and are confirmed for its epoch -> instance."""
        holders = self.holders()
        return {
            name: engine.instance
            for name, engine in self.known()
            if name in holders and engine.epoch == self.target.epoch
        }

    def is_untouched(self) -> bool:
        """Does everyone still hold the committed version, in its epoch, whatever is still under way to them?"""
        if not self.course.is_written:
            return True
        if any(map(self._may_be_ahead, self.withdrawn)):
            return False
        committed, movers, facts = self.position.committed, self.movers(), dict(self.known())
        return all(
            (name in self.sealed or name not in movers)
            and name in facts
            and facts[name].epoch == committed.epoch
            and self.held_version(facts[name]) == committed.version
            for name in self.present()
        )

    def _may_be_ahead(self, name: str) -> bool:
        """May the router have it in the update's epoch? Then it takes no lower one any more."""
        if self.course.update.strategy == "barrier":
            return False
        if self.router is None or ROUTER not in self.sealed or name not in self.router.replicas:
            return True
        return self.router.replicas[name].epoch == self.course.epoch

    def serving(self) -> dict[str, int]:
        assert self.router is not None
        return serving(dict(self.known()), self.router)

    def carried_out(self, receiver: str, ask: Ask) -> None:
        """Note what a command that was answered with success has changed."""
        match ask:
            case SetGate() | Drain() | PublishEpoch():
                self._router_obeyed(ask)
            case Introduce() | Dismiss():
                self.router = None
            case Pause():
                self.sealed.add(receiver)
                self.engines[receiver] = None
            case Serve():
                self.engines[receiver] = None
            case _ if receiver in self.fleet:
                engine = self.engines[receiver]
                self.engines[receiver] = None if engine is None else _obeyed(engine, ask)
        if not isinstance(ask, Drain):
            self.answered.add(receiver)
        elif ask.timeout_s:
            self.answered.add(ask.name)
        if receiver == ROUTER and ROUTER not in self.sealed:
            self.sealed.add(ROUTER)
            self.router = None

    def forget_router(self) -> None:
        """What it was told may have got lost. Engines are read as well: it may know of another life."""
        self.router = None
        self.answered.discard(ROUTER)
        self.engines = dict.fromkeys(self.engines)

    def _router_obeyed(self, ask: SetGate | Drain | PublishEpoch) -> None:
        if self.router is None:
            return
        replicas = dict(self.router.replicas)
        match ask:
            case SetGate():
                self.router = replace(self.router, gate=ask.gate)
            case Drain():
                self.router = replace(
                    self.router, replicas={**replicas, ask.name: replace(replicas[ask.name], draining=ask.draining)}
                )
            case PublishEpoch():
                told = {
                    name: ReplicaFacts(instance=instance, epoch=ask.epoch, draining=replicas[name].draining)
                    for name, instance in ask.instances.items()
                }
                self.router = replace(self.router, replicas={**replicas, **told})


def _obeyed(engine: EngineFacts, ask: Ask) -> EngineFacts:
    match ask:
        case Resume():
            return replace(engine, paused=False)
        case Load():
            return replace(engine, version=str(ask.source["version"]), epoch=None, unfit="", served=None)
        case Prefetch():
            return replace(engine, served=None)
        case ConfirmEpoch():
            return replace(engine, epoch=ask.epoch)
    return engine
