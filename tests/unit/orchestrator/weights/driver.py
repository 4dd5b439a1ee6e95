"""A coordinator whose commands are carried out at once by model engines, unless a test has them refused or ignored."""

from __future__ import annotations

from collections.abc import Callable

from connectors.types import Role
from orchestrator.plan.weights import Limits
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.weights import acts, events
from orchestrator.weights.machine import Coordinator
from orchestrator.weights.words import Phase, Position, ReplicaFacts, Update, first_position
from tests.fakes.weight_fleet import LoadEnd, Refused, SimEngine, SimRouter

LIMITS = Limits(
    prefetch_s=60,
    hold_s=30,
    in_flight_s=60,
    drain_s=60,
    pause_s=60,
    load_s=120,
    command_s=30,
    grace_s=20,
    again_s=5,
    tries=2,
    group_pairs=1,
)
TWO_PAIRS: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
ROUNDS = 1000


class Driver:
    def __init__(self, roles: tuple[Role, ...] = TWO_PAIRS, *, wipes_pool: bool = False) -> None:
        self.wipes_pool = wipes_pool
        self.engines = {f"{role}-{index}": SimEngine(f"{role}-{index}", role) for index, role in enumerate(roles)}
        self.router = SimRouter(self.engines)
        for name, engine in self.engines.items():
            self.router.replicas[name] = ReplicaFacts(instance=engine.instance, epoch=1, draining=False)
        self.journal: list[Position] = [first_position(1, "v0", {"version": "v0"})]
        self.done: list[acts.Act] = []
        self.wire: list[acts.Command] = []
        self.refusals: dict[tuple[str, type[acts.Ask]], str] = {}
        self.silent: set[tuple[str, type[acts.Ask]]] = set()
        """Whose answers get lost; what was asked is done."""
        self.liars: dict[tuple[str, type[acts.Ask]], int] = {}
        """How often they say that they have done it, and do nothing."""
        self.load_ends: dict[str, LoadEnd] = {}
        self.gone: set[str] = set()
        """Versions whose own source is gone."""
        self.dies_after: int | None = None
        """So many acts; what was sent until then is carried out, and its answers are lost."""
        self.now = 0.0
        self.start()

    def start(self) -> None:
        self.wire.clear()
        fleet = {name: engine.role for name, engine in self.engines.items()}
        self.coordinator = Coordinator(
            fleet=fleet,
            wipes_pool=self.wipes_pool,
            position=self.journal[-1],
            join_limits=LIMITS,
            join_mode="gpu_fetch",
        )
        self.step(events.Ticked())

    def update(
        self,
        version: str = "v1",
        strategy: Strategy = "barrier",
        mode: InFlightMode = "readmit",
        transport: str = "path",
    ) -> None:
        update = Update(
            number=self.journal[-1].last_update + 1,
            version=version,
            source={"transport": transport, "version": version},
            strategy=strategy,
            in_flight=mode,
            load_mode="cpu_prefetch",
            limits=LIMITS,
        )
        self.step(events.UpdateAsked(update=update))

    def cancel(self) -> None:
        self.step(events.Cancelled(update=self.journal[-1].last_update))

    def step(self, event: events.Event) -> None:
        for act in self.coordinator.step(event, self.now):
            self.done.append(act)
            if isinstance(act, acts.Record):
                self.journal.append(act.position)
            elif isinstance(act, acts.Command):
                self.wire.append(act)
            elif isinstance(act, acts.Restart):
                self.engines[act.name].end()
            if self.dies_after is not None and len(self.done) >= self.dies_after:
                self.dies_after = None
                for command in self.wire:
                    self.answer(command)
                self.start()
                return

    def run(self, *, until: Callable[[], bool] | None = None) -> None:
        """Until `until` says so, or until nothing is left to do."""
        for _ in range(ROUNDS):
            if until is not None and until():
                return
            if self.wire:
                self.step(self.answer(self.wire.pop(0)))
            elif until is None and self.coordinator.position.course is None:
                return
            else:
                self.now = self.coordinator.wake_at(self.now)
                self.step(events.Ticked())
        raise AssertionError("it does not end")

    def run_to(self, phase: Phase) -> None:
        def is_there() -> bool:
            course = self.coordinator.position.course
            return course is not None and course.phase == phase

        self.run(until=is_there)

    def answer(self, command: acts.Command) -> events.Event:
        key = (command.receiver, type(command.ask))
        if key in self.refusals:
            return events.Answered(order=command.order, error=self.refusals[key])
        if self.liars.get(key, 0):
            self.liars[key] -= 1
            return events.Answered(order=command.order)
        try:
            answer = self._obeyed(command)
        except Refused as refused:
            return events.Answered(order=command.order, error=str(refused))
        return events.OutcomeLost(order=command.order) if key in self.silent else answer

    def _obeyed(self, command: acts.Command) -> events.Event:
        if command.receiver == acts.ROUTER:
            if isinstance(command.ask, acts.ReadRouter):
                return events.RouterRead(order=command.order, facts=self.router.facts())
            self.router.obey(command)
        elif command.receiver in self.engines:
            engine = self.engines[command.receiver]
            if not engine.is_up:
                return events.OutcomeLost(order=command.order)
            if isinstance(command.ask, acts.ReadEngine):
                return events.EngineRead(order=command.order, facts=engine.facts())
            engine.obey(command)
            if isinstance(command.ask, acts.Load):
                is_gone = not command.ask.peer and command.ask.source["version"] in self.gone
                how = "untouched" if is_gone else self.load_ends.get(engine.name, "done")
                engine.end_load(how)
                if how != "done":
                    return events.Answered(order=command.order, error=f"{how}: no bytes")
        return events.Answered(order=command.order)

    def boot(self, name: str) -> None:
        self.engines[name].boot()
        self.router.see(self.engines[name])
        self.step(events.EngineCameUp(name=name))

    # What was asked

    def sent(self, *kinds: type[acts.Ask]) -> list[acts.Command]:
        return [act for act in self.done if isinstance(act, acts.Command) and isinstance(act.ask, kinds)]

    def loaded(self) -> list[tuple[str, str]]:
        """Who was told to load which version, in order."""
        return [
            (each.receiver, str(each.ask.source["version"]))
            for each in self.sent(acts.Load)
            if isinstance(each.ask, acts.Load)
        ]

    def origins(self) -> list[tuple[str, str]]:
        """Who was told to load from whom, in order; empty for the version's own source."""
        return [(each.receiver, each.ask.peer) for each in self.sent(acts.Load) if isinstance(each.ask, acts.Load)]

    def said(self) -> list[str]:
        return [act.text for act in self.done if isinstance(act, acts.Say)]

    def outcomes(self) -> list[str]:
        return [act.ended.outcome for act in self.done if isinstance(act, acts.Finish)]

    def restarted(self) -> list[str]:
        return [act.name for act in self.done if isinstance(act, acts.Restart)]

    def holds(self) -> set[tuple[str, int | None, bool]]:
        """Weights, epoch and whether paused, of all engines that are up."""
        return {(each.weights, each.epoch, each.paused) for each in self.engines.values() if each.is_up}
