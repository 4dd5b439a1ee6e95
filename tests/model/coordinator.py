"""The real coordinator as a function on numbered snapshots: `step(number, event)` gives acts and the next number.

A snapshot is the journal's position with what the machine knows and has open. Two things are left out because only
their order matters, and the model keeps that: the step within an order, and the time, which stands still until
nothing else can happen. Which of two equal replicas a rolling update moves first is left open: a step gives every
outcome that some order of the fleet has.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from orchestrator.errors import UpdateRefused
from orchestrator.plan.weights import Limits
from orchestrator.weights import acts, events
from orchestrator.weights.knowledge import Knowledge
from orchestrator.weights.machine import Coordinator
from orchestrator.weights.words import Course, EngineFacts, Order, Position
from tests.model.fleet import ENGINES, FLEET, NUMBER, RECEIVERS, SWAPS, Swap
from tests.model.plain import Frozen, freeze, read, rename, thaw

_FIRST_STEP, _NEXT_STEP = 10, 100
"""Steps of the commands that are open when a snapshot is thawed, by receiver, and of those sent from then on."""
_WHY = "told"
"""In place of the machine's reasons, which are for people."""


class Sent(NamedTuple):
    """An act: a command."""

    receiver: int
    attempt: tuple[int, int]
    """(update, attempt)."""
    ask: Frozen


class Recorded(NamedTuple):
    """An act: a record of the journal."""

    position: Frozen


class Restarted(NamedTuple):
    """An act: an engine is given up."""

    engine: int


class Finished(NamedTuple):
    """An act: an update has ended."""

    outcome: str


Act = Sent | Recorded | Restarted | Finished


class Outcome(NamedTuple):
    acts: tuple[Act, ...]
    number: int


class Event(NamedTuple):
    """What a coordinator is fed. `receiver` is an engine's, the router's or the pool's number."""

    kind: str
    receiver: int = -1
    value: Frozen = None


class _Snapshot(NamedTuple):
    position: Frozen
    engines: Frozen
    router: Frozen
    names: Frozen
    """Who is away, answered, sealed; who failed; who was asked to serve."""
    open: Frozen
    resting: Frozen
    times: Frozen
    """Until the phase's deadline, and until the purge may begin."""


class Coordinators:
    """Every snapshot met so far, and what came of each event."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._numbers: dict[_Snapshot, int] = {}
        self._snapshots: list[_Snapshot] = []
        self._outcomes: dict[tuple[int, Event], list[Outcome]] = {}
        self._swapped: dict[tuple[int, Swap], int] = {}
        self.open: list[dict[int, Sent]] = []
        """The commands that each snapshot waits for, by receiver."""
        self.local: list[tuple[int, ...]] = []
        """A hash per engine of what each snapshot knows of it, equal for engines that may be exchanged."""

    def position(self, number: int) -> Frozen:
        return self._snapshots[number].position

    def course(self, number: int) -> Course | None:
        """None while no update runs."""
        position: Position = read(self._snapshots[number].position)
        return position.course

    def away(self, number: int) -> set[str]:
        return set(self._snapshots[number].names[0][1:])

    def swapped(self, number: int, swap: Swap) -> int:
        known = self._swapped.get((number, swap))
        if known is None:
            snapshot = self._snapshots[number]
            known = self._number(_Snapshot(*(rename(part, swap) for part in snapshot)))
            self._swapped[number, swap] = known
        return known

    def start(self, position: Frozen) -> list[Outcome]:
        """A new life, from the journal's newest record."""
        made = self._made(position)
        return [self._run(made, events.Ticked(), 0.0, None)]

    def step(self, number: int, event: Event) -> list[Outcome]:
        """Empty where the event is refused."""
        found = self._outcomes.get((number, event))
        if found is None:
            found = self._outcomes[number, event] = self._every_order(number, event)
        return found

    def _every_order(self, number: int, event: Event) -> list[Outcome]:
        outcomes: dict[Outcome, None] = {}
        for swap in SWAPS:
            moved = event._replace(value=rename(event.value, swap))
            if 0 <= event.receiver < len(ENGINES):
                moved = moved._replace(receiver=swap[event.receiver])
            outcome = self._step(self.swapped(number, swap), moved)
            if outcome is None:
                break
            told = tuple(_swapped_act(act, swap) for act in outcome.acts)
            outcomes[Outcome(_in_order(told), self.swapped(outcome.number, swap))] = None
            if not _has_chosen(outcome):
                break
        return list(outcomes)

    def _step(self, number: int, event: Event) -> Outcome | None:
        before = self._snapshots[number]
        machine = self._thawed(before)
        order = machine._post._open[RECEIVERS[event.receiver]].order if event.kind in _ANSWERS else Order(0, 0, 0)
        now = machine.wake_at(0.0) if event.kind == "tick" else 0.0
        try:
            return self._run(machine, _real(event, order), now, before)
        except UpdateRefused:
            return None

    def _run(self, machine: Coordinator, event: events.Event, now: float, before: _Snapshot | None) -> Outcome:
        told: list[Act] = []
        for act in machine.step(event, now):
            match act:
                case acts.Command(receiver=receiver, order=order, ask=ask):
                    is_closing = isinstance(ask, acts.ConfirmEpoch) and ask.epoch is None
                    if not is_closing:  # The engine's restart, which follows, closes its fence as well.
                        told.append(Sent(RECEIVERS.index(receiver), (order.update, order.attempt), freeze(ask)))
                case acts.Record(position=position):
                    told.append(Recorded(_frozen_position(position)))
                case acts.Restart(name=name):
                    told.append(Restarted(NUMBER[name]))
                case acts.Finish(ended=ended):
                    told.append(Finished(ended.outcome))
        return Outcome(_in_order(told), self._number(_frozen(machine, now, before)))

    def _number(self, snapshot: _Snapshot) -> int:
        number = self._numbers.setdefault(snapshot, len(self._snapshots))
        if number == len(self._snapshots):
            self._snapshots.append(snapshot)
            self.open.append({each.receiver: each for each in map(_sent, snapshot.open[1:])})
            self.local.append(tuple(_about(name, snapshot) for name in ENGINES))
        return number

    def _made(self, position: Frozen) -> Coordinator:
        return Coordinator(
            fleet=FLEET, wipes_pool=False, position=read(position), join_limits=self._limits, join_mode="gpu_fetch"
        )

    def _thawed(self, snapshot: _Snapshot) -> Coordinator:
        machine = self._made(snapshot.position)
        away, answered, sealed, failed, asked = (thaw(each) for each in snapshot.names)
        known = dict(snapshot.engines[1:])
        machine._known = Knowledge(
            fleet=FLEET,
            wipes_pool=False,
            position=machine.position,
            engines={name: read(known[name]) for name in FLEET},
            router=read(snapshot.router),
            away=away,
            answered=answered,
            sealed=sealed,
            failed=dict.fromkeys(failed, _WHY),
            asked=asked,
        )
        for name, (_, (_, update, attempt), ask) in snapshot.open[1:]:
            order = Order(update, attempt, _FIRST_STEP + RECEIVERS.index(name))
            machine._post._open[name] = acts.Command(receiver=name, order=order, ask=read(ask))
        machine._post._not_before = thaw(snapshot.resting)
        machine._post._step = _NEXT_STEP
        machine._is_new = False
        machine._deadline, machine._due = snapshot.times
        return machine


_ANSWERS = ("answered", "refused", "lost", "engine read", "router read")


def _real(event: Event, order: Order) -> events.Event:
    name = RECEIVERS[event.receiver] if event.receiver >= 0 else ""
    made: dict[str, Any] = {
        "answered": lambda: events.Answered(order=order),
        "refused": lambda: events.Answered(order=order, error=_WHY),
        "lost": lambda: events.OutcomeLost(order=order),
        "engine read": lambda: events.EngineRead(order=order, facts=thaw(event.value)),
        "router read": lambda: events.RouterRead(order=order, facts=thaw(event.value)),
        "ended": lambda: events.EngineEnded(name=name),
        "came up": lambda: events.EngineCameUp(name=name),
        "router came up": events.RouterCameUp,
        "tick": events.Ticked,
        "asked": lambda: events.UpdateAsked(update=thaw(event.value)),
        "cancelled": lambda: events.Cancelled(update=event.value),
    }
    real: events.Event = made[event.kind]()
    return real


def _sent(item: Frozen) -> Sent:
    name, (_, (_, update, attempt), ask) = item
    return Sent(RECEIVERS.index(name), (update, attempt), ask)


def _frozen(machine: Coordinator, now: float, before: _Snapshot | None) -> _Snapshot:
    known, post = machine._known, machine._post
    left = (max(machine._deadline - now, 0.0), max(machine._due - now, 0.0))
    is_old = before is not None and known.position is read(before.position)
    has_old_router = before is not None and known.router is read(before.router)
    return _Snapshot(
        position=before.position if before is not None and is_old else _frozen_position(known.position),
        engines=(dict, *((name, _frozen_facts(known.engines[name])) for name in sorted(ENGINES))),
        router=before.router if before is not None and has_old_router else freeze(known.router),
        names=tuple(
            freeze(set(each)) for each in (known.away, known.answered, known.sealed, known.failed, known.asked)
        ),
        open=freeze({name: ((each.order.update, each.order.attempt), each.ask) for name, each in post._open.items()}),
        resting=freeze({name: until - now for name, until in post._not_before.items() if until > now}),
        times=left,
    )


@cache
def _frozen_common(facts: EngineFacts | None) -> Frozen:
    return freeze(facts)


def _frozen_facts(facts: EngineFacts | None) -> Frozen:
    return freeze(facts) if facts is not None and facts.served is not None else _frozen_common(facts)


def _frozen_position(position: Position) -> Frozen:
    if position.course is not None and position.course.why:
        position = replace(position, course=replace(position.course, why=_WHY))
    return freeze(replace(position, ended=None))


def _in_order(told: tuple[Act, ...] | list[Act]) -> tuple[Act, ...]:
    """Commands between two records in the receivers' order: they are under way at the same time."""
    done: list[Act] = []
    commands: list[Sent] = []
    for act in told:
        if isinstance(act, Sent):
            commands.append(act)
        else:
            done += [*sorted(commands, key=lambda each: each.receiver), act]
            commands = []
    return (*done, *sorted(commands, key=lambda each: each.receiver))


def _swapped_act(act: Act, swap: Swap) -> Act:
    match act:
        case Sent():
            moved = swap[act.receiver] if act.receiver < len(ENGINES) else act.receiver
            return act._replace(receiver=moved, ask=rename(act.ask, swap))
        case Recorded():
            return Recorded(rename(act.position, swap))
        case Restarted():
            return Restarted(swap[act.engine])
    return act


def _has_chosen(outcome: Outcome) -> bool:
    """Were some of several equal engines chosen?"""
    positions = [read(act.position) for act in outcome.acts if isinstance(act, Recorded)]
    return any(each.course is not None and each.course.phase == "drain" for each in positions)


def _about(name: str, snapshot: _Snapshot) -> int:
    """A hash of what a snapshot has of one engine, without its name."""
    swap = {"P0": SWAPS[1], "D0": SWAPS[2]}.get(name, SWAPS[0])
    course = read(snapshot.position).course
    parts: list[Frozen] = [
        rename(dict(snapshot.engines[1:])[name], swap),
        *(name in each for each in snapshot.names),
        rename(dict(snapshot.open[1:]).get(name), swap),
        rename(dict(snapshot.resting[1:]).get(name), swap),
        snapshot.router and rename(dict(snapshot.router[2][1:])[name], swap),
        course is not None and name in course.group,
    ]
    return hash(tuple(parts))
