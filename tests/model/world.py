"""The state of a whole job as one hashable value, and the form in which states that differ by names alone are one."""

from __future__ import annotations

from typing import NamedTuple

from connectors.types import Role
from orchestrator.plan.weights import Limits
from orchestrator.spec.weights import InFlightMode
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.words import first_position
from router.core.gate import GateState
from tests.model.coordinator import Coordinators
from tests.model.core import Core, Cores, first_core, swapped_core
from tests.model.engine import Engine, first_engine
from tests.model.fleet import ENGINES, SAME, Setup, Swap
from tests.model.plain import Frozen, freeze, rename
from tests.model.request import Requests

IDLE = -1
"""In place of a request's number."""
_AGAIN_S, _PHASE_S = 1.0, 2.0
"""A phase lasts for two tries: more of them would make more states and no others."""


class Violated(Exception):
    """An invariant does not hold."""


class Leg(NamedTuple):
    """A leg from the moment that it is sent."""

    engine: int
    life: int
    """Of the engine that it is meant for."""
    role: Role
    epoch: int
    version: str
    """What the router promises of that epoch."""
    salt: int
    has_handoff: bool
    stage: str
    """air, fetching (its handoff), running, streaming."""
    weights: frozenset[str]
    """What the KV that it stands on was computed from, and its tokens."""


class Handoff(NamedTuple):
    engine: int
    life: int
    epoch: int
    weights: frozenset[str]
    is_fresh: bool


class Granted(NamedTuple):
    ticket: int
    engine: int
    life: int
    epoch: int
    version: str


class NotGranted(NamedTuple):
    kind: str


class GateMoved(NamedTuple):
    gate: GateState


class Interrupts(NamedTuple):
    how: str


Message = Granted | NotGranted | GateMoved | Interrupts


class Session(NamedTuple):
    """A client and the router's worker that it is connected to."""

    turns: int
    """Still to come, the present one included."""
    request: int
    gate: GateState
    """As the worker knows it."""
    keeps: bool = False
    """So is this."""
    mailbox: tuple[Message, ...] = ()
    """From the dispatcher to the worker, in order."""
    engine: int = -1
    life: int = -1
    """Of the last grant."""
    leg: Leg | None = None
    handoff: Handoff | None = None
    told: frozenset[str] = frozenset()
    """What the tokens that the client has were computed from."""


class Late(NamedTuple):
    """A command that is under way while nobody waits for its answer any more."""

    receiver: int
    attempt: tuple[int, int]
    ask: Frozen


class Op(NamedTuple):
    """A command that the router's workers are carrying out."""

    gate: GateState | None
    in_flight: InFlightMode | None


class Key(NamedTuple):
    """A key of the pool, and what the model knows of its block beside."""

    prefix: int
    salt: int
    epoch: int
    weights: str


class News(NamedTuple):
    """What has happened to an engine (or the router) and is not known to the coordinator, or has to be done to it."""

    kind: str
    """ended, came up, boots."""
    number: int


class State(NamedTuple):
    coordinator: int
    taken: frozenset[int]
    """Receivers of commands that have arrived and whose answers come later."""
    late: frozenset[Late]
    engines: tuple[Engine, ...]
    core: Core
    op: Op | None
    router_order: tuple[int, int]
    sessions: tuple[Session, ...]
    orphans: frozenset[Leg]
    """Legs whose router is gone."""
    pool: frozenset[Key]
    promised: frozenset[tuple[int, str]]
    """Epochs that were given out, and their versions."""
    asked: int
    """Updates so far."""
    faults: int
    """That may still happen."""
    news: frozenset[News]


class Model:
    """What an exploration works with: its setup, the safeguards that are removed, and the real cores' tables."""

    def __init__(self, setup: Setup, removed: str = "", **flow_rules: float) -> None:
        limits = Limits(
            **dict.fromkeys(("prefetch_s", "hold_s", "in_flight_s", "drain_s", "pause_s", "load_s"), _PHASE_S),
            command_s=_PHASE_S,
            grace_s=_AGAIN_S,
            again_s=_AGAIN_S,
            tries=setup.tries,
            group_pairs=1,
        )
        self.setup = setup
        self.limits = limits
        self.removed = removed
        """The name of a safeguard that the model goes without; see `mutations.py`."""
        self.coordinators = Coordinators(limits)
        self.cores = Cores()
        self.requests = Requests(**flow_rules)
        self.replies: set[str] = set()
        """What kinds of replies were seen: the versions that they say they are of."""

    def first(self) -> State:
        position = freeze(first_position(1, FIRST_VERSION, {"version": FIRST_VERSION}))
        (outcome,) = self.coordinators.start(position)
        return State(
            coordinator=outcome.number,
            taken=frozenset(),
            late=frozenset(),
            engines=(first_engine(),) * len(ENGINES),
            core=first_core(FIRST_VERSION),
            op=None,
            router_order=(0, 0),
            sessions=tuple(Session(turns, IDLE, "open") for turns in self.setup.turns),
            orphans=frozenset(),
            pool=frozenset(),
            promised=frozenset({(1, FIRST_VERSION)}),
            asked=0,
            faults=int(self.setup.fault != "none"),
            news=frozenset(),
        )

    def canonical(self, state: State) -> State:
        """One of the states that differ from this one by an exchange of equal replicas or sessions."""
        about = [self._about(state, number) for number in range(len(ENGINES))]
        prefill, decode = about[0] > about[1], about[2] > about[3]
        if prefill or decode:
            state = self._swapped(state, (1 if prefill else 0, 0 if prefill else 1, *((3, 2) if decode else (2, 3))))
        first, second = state.sessions
        places = state.core.places
        if hash((first, places[0])) > hash((second, places[1])):
            state = state._replace(sessions=(second, first), core=state.core._replace(places=places[::-1]))
        return state

    def _about(self, state: State, number: int) -> int:
        """A hash of what a state says of one engine, equal for those that may be exchanged."""
        engine = state.engines[number]
        refs = sorted(
            hash((each.request, each.engine == number, each.leg and each.leg.engine == number,
                  each.handoff and each.handoff.engine == number))
            for each in state.sessions
            if number in (each.engine, each.leg and each.leg.engine, each.handoff and each.handoff.engine)
            or any(isinstance(message, Granted) and message.engine == number for message in each.mailbox)
        )  # fmt: skip
        return hash(
            (
                engine,
                state.core.replicas[number],
                self.coordinators.local[state.coordinator][number],
                tuple(refs),
                number in state.taken,
                sum(each.receiver == number for each in state.late),
                frozenset(each.kind for each in state.news if each.number == number),
            )
        )

    def _swapped(self, state: State, swap: Swap) -> State:
        if swap == SAME:
            return state
        return state._replace(
            coordinator=self.coordinators.swapped(state.coordinator, swap),
            taken=frozenset(_moved(each, swap) for each in state.taken),
            late=frozenset(
                Late(_moved(each.receiver, swap), each.attempt, rename(each.ask, swap)) for each in state.late
            ),
            engines=tuple(state.engines[swap[each]] for each in range(len(ENGINES))),
            core=swapped_core(state.core, swap),
            sessions=tuple(_swapped_session(each, swap) for each in state.sessions),
            orphans=frozenset(each._replace(engine=swap[each.engine]) for each in state.orphans),
            news=frozenset(News(each.kind, _moved(each.number, swap)) for each in state.news),
        )


def _moved(receiver: int, swap: Swap) -> int:
    return swap[receiver] if 0 <= receiver < len(swap) else receiver


def _swapped_session(session: Session, swap: Swap) -> Session:
    return session._replace(
        mailbox=tuple(
            each._replace(engine=swap[each.engine]) if isinstance(each, Granted) else each for each in session.mailbox
        ),
        engine=_moved(session.engine, swap),
        leg=session.leg and session.leg._replace(engine=swap[session.leg.engine]),
        handoff=session.handoff and session.handoff._replace(engine=swap[session.handoff.engine]),
    )
