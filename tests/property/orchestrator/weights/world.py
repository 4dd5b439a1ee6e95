"""The real coordinator among model engines and a model router: commands and answers get lost or come late, loads fail,
lives end, and the coordinator dies between any two acts. After every step the invariants are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from connectors.types import Role
from orchestrator.errors import UpdateRefused
from orchestrator.plan.weights import Limits
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.weights import acts, events
from orchestrator.weights.machine import Coordinator
from orchestrator.weights.words import Order, Position, ReplicaFacts, Update, first_position
from tests.fakes.weight_fleet import OVERTAKEN, LoadEnd, Refused, SimEngine, SimRouter

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


@dataclass(frozen=True)
class Faults:
    """What may go wrong."""

    lives_end: bool = False
    coordinator_dies: bool = False
    answers_get_lost: bool = False
    loads_fail: bool = False
    sources_go: bool = False
    """That of the version which is served: then only peers have it."""
    engines_are_drained: bool = False
    """And undrained, any of them at any time."""


ALL_FAULTS = Faults(lives_end=True, coordinator_dies=True, answers_get_lost=True, loads_fail=True, sources_go=True)
NO_FAULTS = Faults()


class World:
    def __init__(self, roles: list[Role], random: Random, faults: Faults) -> None:
        self.random, self.faults, self.now = random, faults, 0.0
        self.engines = {f"{role}-{index}": SimEngine(f"{role}-{index}", role) for index, role in enumerate(roles)}
        self.router = SimRouter(self.engines)
        for name, engine in self.engines.items():
            self.router.replicas[name] = ReplicaFacts(instance=engine.instance, epoch=1, draining=False)
        self.journal: list[Position] = [first_position(1, "v0", {"version": "v0"})]
        self.wire: list[acts.Command] = []
        """Sent and not arrived."""
        self.late: list[acts.Command] = []
        """The same, and nobody waits for their answers any more."""
        self.newest: dict[str, Order] = {}
        self.loads: dict[str, acts.Command] = {}
        self.replies: list[events.Event] = []
        self.finished: list[acts.Finish] = []
        self.said: list[str] = []
        self.purged: set[int] = set()
        self.unnoticed: list[SimEngine] = []
        """Engines in another life than the router and the coordinator know."""
        self.story: list[str] = []
        self.withdrawn: frozenset[str] = frozenset()
        self.start()

    def start(self) -> None:
        """A life of the coordinator: from the journal's newest record."""
        fleet = {name: engine.role for name, engine in self.engines.items()}
        self.coordinator = Coordinator(
            fleet=fleet, wipes_pool=False, position=self.journal[-1], join_limits=LIMITS, join_mode="gpu_fetch"
        )
        self.step(events.Withdrawn(names=self.withdrawn))

    def ask(
        self, version: str, strategy: Strategy, in_flight: InFlightMode = "readmit", *, prefetch: bool = True
    ) -> bool:
        update = Update(
            number=self.journal[-1].last_update + 1,
            version=version,
            source={"version": version},
            strategy=strategy,
            in_flight=in_flight,
            load_mode="cpu_prefetch" if prefetch else "gpu_fetch",
            limits=LIMITS,
        )
        try:
            self.step(events.UpdateAsked(update=update))
        except UpdateRefused:
            return False
        return True

    def step(self, event: events.Event) -> None:
        self.story.append(f"{self.now:g} {event}")
        dies = self.faults.coordinator_dies and self.random.random() < 0.02
        done = self.coordinator.step(event, self.now)
        cut = self.random.randrange(len(done) + 1) if dies else len(done)
        for act in done[:cut]:
            self.carry_out(act)
        self.check()
        if dies:
            self.kill_coordinator()

    def kill_coordinator(self) -> None:
        self.story.append("the coordinator dies")
        self.late += self.wire
        self.wire, self.replies, self.loads = [], [], {}
        self.start()

    def carry_out(self, act: acts.Act) -> None:
        self.story.append(f"    {in_short(act)}")
        match act:
            case acts.Record(position=position):
                self.check_record(self.journal[-1], position)
                self.journal.append(position)
            case acts.Command():
                self.wire.append(act)
                self.newest[act.receiver] = act.order
            case acts.Restart(name=name):
                self.engines[name].end()
                self.loads.pop(name, None)
            case acts.Finish():
                self.finished.append(act)
            case acts.Say(text=text):
                self.said.append(text)

    # What happens

    def happen(self) -> None:
        """One thing, whichever."""
        choices = [self.tick, *4 * [self.arrive, self.reply], self.end_some_load, self.request]
        choices += [self.boot_some]
        if self.faults.lives_end and self.random.random() < 0.05:
            choices = [self.end_some_life]
        if self.faults.answers_get_lost and self.late:
            choices.append(self.arrive_late)
        if self.random.random() < 0.003:
            choices = [lambda: self.step(events.Cancelled(update=self.journal[-1].last_update))]
        if self.faults.engines_are_drained and self.random.random() < 0.01:
            choices = [self.withdraw_some]
        self.random.choice(choices)()
        self.check()

    def withdraw_some(self) -> None:
        self.withdraw(frozenset(name for name in self.engines if self.random.random() < 0.3))

    def withdraw(self, names: frozenset[str]) -> None:
        self.withdrawn = names
        self.step(events.Withdrawn(names=names))

    def tick(self) -> None:
        self.now = min(self.coordinator.wake_at(self.now), self.now + 5)
        self.step(events.Ticked())

    def arrive(self) -> None:
        if not self.wire:
            return
        command = self.wire.pop(self.random.randrange(len(self.wire)))
        if self.faults.answers_get_lost and self.random.random() < 0.1:
            if self.random.random() < 0.7:
                self.late.append(command)
            self.replies.append(events.OutcomeLost(order=command.order))
            return
        self.deliver(command, is_late=False)

    def arrive_late(self) -> None:
        self.deliver(self.late.pop(self.random.randrange(len(self.late))), is_late=True)

    def deliver(self, command: acts.Command, *, is_late: bool) -> None:
        error = ""
        try:
            answer = self.obeyed(command)
        except Refused as refused:
            error = str(refused)
            answer = events.Answered(order=command.order, error=error)
        is_newest = command.order == self.newest.get(command.receiver)
        assert not (is_newest and error == OVERTAKEN), f"{command} is older than a command before it"
        if answer is None and not is_late:
            self.loads[command.receiver] = command
        elif answer is not None and not is_late:
            lost = self.faults.answers_get_lost and self.random.random() < 0.1
            self.replies.append(events.OutcomeLost(order=command.order) if lost else answer)

    def obeyed(self, command: acts.Command) -> events.Event | None:
        """None: the answer comes when the load ends. Raises `Refused`."""
        order = command.order
        may_fail = isinstance(command.ask, acts.Prefetch | acts.HandleInFlight | acts.Drain)
        if may_fail and self.faults.loads_fail and self.random.random() < 0.15:
            raise Refused("not in time")
        if command.receiver == acts.POOL:
            assert isinstance(command.ask, acts.Purge)
            self.purged.add(command.ask.epoch)
            return events.Answered(order=order)
        if command.receiver == acts.ROUTER:
            if isinstance(command.ask, acts.ReadRouter):
                return events.RouterRead(order=order, facts=self.router.facts())
            served = self.router.has_pair()
            self.router.obey(command)
            is_by_itself = not self.faults.lives_end and not self.faults.engines_are_drained
            if is_by_itself and self.is_rolling_drain(command):
                assert self.router.has_pair() or not served, "rolling: no pair serves any more"
            return events.Answered(order=order)
        engine = self.engines[command.receiver]
        if not engine.is_up:
            return events.OutcomeLost(order=order)
        if isinstance(command.ask, acts.ReadEngine):
            return events.EngineRead(order=order, facts=engine.facts())
        engine.obey(command)
        if isinstance(command.ask, acts.Load):
            self.check_load(engine)
            return None
        return events.Answered(order=order)

    def is_rolling_drain(self, command: acts.Command) -> bool:
        course = self.journal[-1].course
        is_drain = isinstance(command.ask, acts.Drain) and command.ask.draining
        return is_drain and course is not None and course.update.strategy == "rolling"

    def end_some_load(self) -> None:
        loading = [engine for engine in self.engines.values() if engine.load is not None]
        if not loading:
            return
        engine = self.random.choice(loading)
        how: LoadEnd = "done"
        if self.faults.loads_fail and self.random.random() < 0.4:
            how = self.random.choice(["untouched", "torn", "lost"])
        if self.faults.sources_go and not engine.load.peer and self.is_served(engine.load):
            how = "untouched"
        engine.end_load(how)
        command = self.loads.pop(engine.name, None)
        if command is not None:
            error = "" if how == "done" else f"the load failed: {how}"
            self.replies.append(events.Answered(order=command.order, error=error))

    def is_served(self, load: acts.Load) -> bool:
        return bool(load.source["version"] == self.journal[-1].committed.version)

    def reply(self) -> None:
        if self.replies:
            self.step(self.replies.pop(self.random.randrange(len(self.replies))))

    def request(self) -> None:
        for engine, _ in list(self.router.serving()):
            engine.running = True

    def boot_some(self) -> None:
        for engine in self.engines.values():
            if not engine.is_up or engine in self.unnoticed:
                if not engine.is_up:
                    engine.boot()
                if engine in self.unnoticed:
                    self.unnoticed.remove(engine)
                self.router.see(engine)
                self.step(events.EngineCameUp(name=engine.name))
                return

    def end_some_life(self) -> None:
        if self.random.random() < 0.2:
            self.router.boot()
            # What was on its way went to the life before, by a connection that ended with it.
            self.late = [command for command in self.late if command.receiver != acts.ROUTER]
            self.wire = [command for command in self.wire if command.receiver != acts.ROUTER]
            self.step(events.RouterCameUp())
            return
        engine = self.random.choice(list(self.engines.values()))
        engine.end()
        self.loads.pop(engine.name, None)
        if self.random.random() < 0.5:
            self.step(events.EngineEnded(name=engine.name))
        else:
            # It is there again, behind the same port, before anyone notices (A41).
            engine.boot()
            self.unnoticed.append(engine)

    # What must hold

    def check(self) -> None:
        versions = {epoch: name for position in self.journal for epoch, name in position.epochs.items()}
        for engine in self.engines.values():
            if engine.epoch is not None and not engine.unfit:
                assert engine.weights == versions[engine.epoch], f"{engine} serves weights of another epoch"
        committed = self.journal[-1].committed
        if self.router.gate == "open":
            for engine, epoch in self.router.serving():
                assert epoch != committed.epoch or engine.weights == committed.version, (
                    f"{engine} is of another version"
                )
        course = self.journal[-1].course
        if course is None or course.phase == "purge":
            assert all(epoch == committed.epoch for _, epoch in self.router.serving()), "an older epoch still serves"
        after_freeze = ("pause_decode", "load", "commit", "confirm", "publish", "resume")
        is_shut = course is not None and course.update.strategy == "barrier" and course.going in ("forward", "back")
        if course is not None and is_shut and course.phase in after_freeze:
            assert self.router.gate == "frozen", "the gate is not frozen inside a barrier"
        assert committed.epoch not in self.purged, "the committed epoch was purged"

    def check_record(self, before: Position, after: Position) -> None:
        assert after.last_epoch >= before.last_epoch
        assert (after.last_update, after.attempt) >= (before.last_update, before.attempt)
        if after.committed == before.committed:
            return
        assert after.committed.epoch > before.committed.epoch
        for engine in (each for name, each in self.engines.items() if name not in self.withdrawn):
            # Who was restarted meanwhile has what is on its disk, and is fenced.
            is_told = engine.weights in (after.committed.version, "disk") and not engine.unfit
            assert is_told or not engine.is_up, f"the version moved without the verdict of {engine} (A28)"

    def check_load(self, engine: SimEngine) -> None:
        course = self.journal[-1].course
        assert engine.paused, "a load into an engine that is not paused"
        kept = course is not None and course.update.in_flight == "keep" and course.update.strategy == "barrier"
        assert kept or not engine.running, "a load under running requests"

    def check_settled(self) -> None:
        committed = self.journal[-1].committed
        assert self.router.gate == "open"
        for engine in self.engines.values():
            assert (engine.epoch, engine.weights, engine.paused) == (committed.epoch, committed.version, False)
        serving = {engine.name: epoch for engine, epoch in self.router.serving()}
        assert serving == dict.fromkeys(self.engines, committed.epoch)

    def settle(self) -> None:
        """Nothing fails any more: everything ends, and the fleet is whole."""
        # A drain of before may still arrive.
        self.faults = Faults(engines_are_drained=self.faults.engines_are_drained)
        self.withdraw(frozenset())
        for _ in range(3000):
            down = any(engine.load or not engine.is_up for engine in self.engines.values())
            moved = self.wire or self.replies or down or self.unnoticed
            if not moved and self.coordinator.position.course is None and self.quiet():
                return
            if moved:
                self.random.choice([self.arrive, self.reply, self.end_some_load, self.boot_some, self.request])()
            else:
                self.tick()
            self.check()
        raise AssertionError("it does not settle")

    def quiet(self) -> bool:
        """Does a further tick ask for nothing?"""
        for _ in range(3):
            self.tick()
        return not self.wire


def in_short(act: acts.Act) -> str:
    if not isinstance(act, acts.Record):
        return str(act)
    position, course = act.position, act.position.course
    where = f"{course.going} {course.phase} to epoch {course.epoch} {course.group}" if course else "idle"
    return f"Record {position.last_update}.{position.attempt}: {where}, committed {position.committed}"
