"""The real dispatcher of the router, with its fleet, gate and epochs, rebuilt from a small state for each operation.

`Core` has what decides: the gate, the epochs, what is known of each replica, who waits and who holds a place. Which of
the replicas that will do is chosen is left open: an operation gives every outcome that some policy has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.dispatcher import Dispatcher, Limits, _Request
from router.core.epochs import Epochs
from router.core.fleet import Fleet
from router.core.gate import Gate, GateState
from router.core.load import LoadIndex
from router.core.policies import Choice, ChoiceContext
from router.core.policies.base import candidates
from router.settings import EngineEndpoint, RouterSettings
from tests.model.fleet import ENGINES, FLEET, NUMBER, ROLES, Swap, instance, life_of

_LIMITS = Limits(max_requests=None, max_waiting=100, max_wait_s=1e9, skip_prefill_below_tokens=0)
_SETTINGS = RouterSettings(
    job="model",
    host="127.0.0.1",
    port=0,
    internal_host="127.0.0.1",
    internal_port=0,
    engines=tuple(EngineEndpoint(name=name, role=role, url=f"http://{name}") for name, role in FLEET.items()),
    handoff_lease_s=30.0,
    leg_failures=1000,
)
_FIRST = -1
"""Waiting for a first leg; else the epoch that a second one needs."""
SESSIONS = (0, 1)


class Replica(NamedTuple):
    """A member of the router's fleet. `life` -1: no probe has met it yet."""

    life: int
    epoch: int | None
    draining: bool
    alive: bool


class Place(NamedTuple):
    """What a request has: the leg for which it waits in line, and the replicas where it holds a place."""

    waits_for: int | None
    held: tuple[int, ...]


class Core(NamedTuple):
    gate: GateState
    epochs: tuple[tuple[int, str], ...]
    replicas: tuple[Replica, ...]
    places: tuple[Place | None, ...]
    """By session; None: no request of it is known here."""


class Told(NamedTuple):
    """An answer of the dispatcher: a grant, or a refusal whose kind is given."""

    session: int
    refusal: str
    engine: int = -1
    life: int = -1
    epoch: int = 0
    version: str = ""


Result = tuple[Core, tuple[Told, ...]]
Operation = Callable[[Dispatcher], Grant | Refusal | None]


def first_core(version: str) -> Core:
    replica = Replica(life=0, epoch=1, draining=False, alive=True)
    return Core("open", ((1, version),), (replica,) * len(ENGINES), (None, None))


def restarted_core(lives: Sequence[int | None]) -> Core:
    """Of a router's new life, after its first probes."""
    replicas = tuple(Replica(-1 if life is None else life, None, False, life is not None) for life in lives)
    return Core("frozen", (), replicas, (None, None))


def swapped_core(core: Core, swap: Swap) -> Core:
    places = tuple(
        place and place._replace(held=tuple(sorted(swap[each] for each in place.held))) for place in core.places
    )
    return core._replace(replicas=tuple(core.replicas[swap[each]] for each in range(len(ENGINES))), places=places)


class Cores:
    """What came of every operation so far."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], list[Result]] = {}

    def ask(self, core: Core, session: int, epoch: int | None) -> list[Result]:
        """For a first leg, or for the second of a handoff of this epoch."""

        def ask(dispatcher: Dispatcher) -> Grant | Refusal | None:
            return dispatcher.ask(_ask(session, epoch), 0.0)

        return self._all((core, "ask", session, epoch), core, ask, session)

    def end_leg(self, core: Core, session: int, engine: int) -> list[Result]:
        def end(dispatcher: Dispatcher) -> None:
            ticket = next(
                ticket
                for ticket, made in dispatcher.fleet._open.items()
                if made.member.name == ENGINES[engine] and made.session is dispatcher._requests[session].session
            )
            dispatcher.end_leg(LegEnd(ticket=ticket, outcome="cancelled"), 0.0)

        return self._all((core, "end", session, engine), core, end)

    def leave(self, core: Core, session: int) -> list[Result]:
        return self._all((core, "leave", session), core, lambda dispatcher: dispatcher.leave(session, 0.0))

    def set_gate(self, core: Core, gate: GateState) -> list[Result]:
        def move(dispatcher: Dispatcher) -> None:
            dispatcher.gate.set(gate)
            dispatcher.look_again(0.0)

        return self._all((core, "gate", gate), core, move)

    def publish(self, core: Core, epoch: int, version: str, lives: tuple[tuple[int, int], ...]) -> list[Result]:
        """As `router/io/admin.py` does it; an empty list where it refuses."""
        if dict(core.epochs).get(epoch, version) != version:
            return []
        for engine, life in lives:
            replica = core.replicas[engine]
            if life != replica.life != -1 or (replica.epoch is not None and replica.epoch > epoch):
                return []

        def commit(dispatcher: Dispatcher) -> None:
            dispatcher.epochs.commit(epoch, version)
            for engine, life in lives:
                dispatcher.fleet.members[ENGINES[engine]].instance = instance(engine, life)
                dispatcher.fleet.confirm(ENGINES[engine], epoch)
            dispatcher.look_again(0.0)

        return self._all((core, "publish", epoch, version, lives), core, commit)

    def drain(self, core: Core, engine: int, draining: bool) -> list[Result]:
        def drain(dispatcher: Dispatcher) -> None:
            dispatcher.fleet.drain(ENGINES[engine], draining)
            dispatcher.look_again(0.0)

        return self._all((core, "drain", engine, draining), core, drain)

    def probe(self, core: Core, engine: int, life: int | None) -> list[Result]:
        """A probe meets this life of an engine, or (as often as it takes) none."""

        def probe(dispatcher: Dispatcher) -> None:
            name, fleet = ENGINES[engine], dispatcher.fleet
            if life is None:
                while fleet.members[name].alive:
                    fleet.probe_failed(name, "refused", 0.0)
            elif fleet.recognise(name, instance(engine, life), 0.0):
                fleet.probe_passed(name, 0.0)
            dispatcher.look_again(0.0)

        return self._all((core, "probe", engine, life), core, probe)

    def _all(self, key: tuple[object, ...], core: Core, operation: Operation, session: int = -1) -> list[Result]:
        found = self._results.get(key)
        if found is None:
            outcomes: dict[Result, None] = {}
            for wishes in product((0, 1), repeat=len(SESSIONS)):
                dispatcher, policy = _rebuilt(core), _AnyReplica(wishes)
                for role in dispatcher.fleet._policies:
                    dispatcher.fleet._policies[role] = policy
                now = operation(dispatcher)
                told = [] if now is None else [_told(session, now)]
                told += [_told(number, answer) for number, answer in dispatcher.outbox]
                outcomes[_core_of(dispatcher), tuple(told)] = None
                if not policy.had_a_choice:
                    break
            found = self._results[key] = list(outcomes)
        return found


class _AnyReplica:
    """A policy that takes the one that each session wishes for, of those that will do."""

    def __init__(self, wishes: tuple[int, ...]) -> None:
        self._wishes = wishes
        self.had_a_choice = False

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        members = candidates(indexes)
        self.had_a_choice = self.had_a_choice or len(members) > 1
        return Choice(members[min(self._wishes[int(context.key)], len(members) - 1)], "unpinned") if members else None


class _ThisReplica:
    def __init__(self, name: str) -> None:
        self._name = name

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        return Choice(next(each for each in candidates(indexes) if each.name == self._name), "unpinned")


def _ask(session: int, epoch: int | None) -> Ask:
    return Ask(
        request=session, place=session, serial=1, session=None, session_lasts=False, tokens=1, handoff_epoch=epoch
    )


def _rebuilt(core: Core) -> Dispatcher:
    fleet, epochs, gate = Fleet(_SETTINGS), Epochs(), Gate()
    for epoch, version in core.epochs:
        epochs.commit(epoch, version)
    dispatcher = Dispatcher(fleet=fleet, gate=gate, epochs=epochs, limits=_LIMITS)
    for name in ENGINES:
        fleet.confirm(name, 0)
        fleet.probe_passed(name, 0.0)
    for session, place in enumerate(core.places):
        if place is None:
            continue
        if place.waits_for is not None:
            dispatcher.ask(_ask(session, None if place.waits_for == _FIRST else place.waits_for), 0.0)
        else:
            dispatcher._requests[session] = _Request(session, fleet.sessions.begin_request(None))
        for engine in place.held:
            role = ROLES[engine]
            fleet._policies[role] = _ThisReplica(ENGINES[engine])
            made = fleet.place(dispatcher._requests[session].session, role, [0], tokens=1, now=0.0)
            assert made is not None
    for name, replica in zip(ENGINES, core.replicas, strict=True):
        member = fleet.members[name]
        member.instance = instance(NUMBER[name], replica.life) if replica.life >= 0 else ""
        fleet.confirm(name, replica.epoch)
        if replica.draining:
            fleet.drain(name)
        while member.alive and not replica.alive:
            fleet.probe_failed(name, "refused", 0.0)
    gate.set(core.gate)
    dispatcher.outbox.clear()
    return dispatcher


def _core_of(dispatcher: Dispatcher) -> Core:
    fleet = dispatcher.fleet
    places: list[Place | None] = []
    for session in SESSIONS:
        request = dispatcher._requests.get(session)
        if request is None:
            places.append(None)
            continue
        asked = request.ask
        held = (NUMBER[made.member.name] for made in fleet._open.values() if made.session is request.session)
        waits_for = None if asked is None else _FIRST if asked.handoff_epoch is None else asked.handoff_epoch
        places.append(Place(waits_for, tuple(sorted(held))))
    members = [fleet.members[name] for name in ENGINES]
    return Core(
        gate=dispatcher.gate.state,
        epochs=tuple(sorted(dispatcher.epochs.newest(100).items())),
        replicas=tuple(
            Replica(life_of(each.instance) if each.instance else -1, each.epoch, each.draining, each.alive)
            for each in members
        ),
        places=tuple(places),
    )


def _told(session: int, answer: Grant | Refusal) -> Told:
    if isinstance(answer, Refusal):
        return Told(session, answer.kind)
    life = life_of(answer.instance) if answer.instance else -1
    return Told(session, "", NUMBER[answer.replica], life, answer.epoch, answer.version)
