"""What may happen between the coordinator and the others: commands arrive, also late ones; pauses and the router's work
end; time passes; the trainer asks for an update.

A command, what it does and its answer are one move where the order of the three can't matter: a coordinator that dies
between the first two leaves a late command, which may still be carried out, and one that dies between the last two has
only forgotten the answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.weights.acts import ConfirmEpoch, Load, Purge, ReadEngine
from orchestrator.weights.words import Update
from tests.model.at_engine import at_engine, is_quiet, pause_ends, without_leases
from tests.model.at_router import at_router, drained, finished
from tests.model.coordinator import Event, Sent
from tests.model.fleet import ENGINES, POOL_NUMBER, RECEIVERS, ROUTER_NUMBER
from tests.model.invariants import check_purged
from tests.model.plain import Frozen, freeze, read
from tests.model.steps import answer, coordinate, reply
from tests.model.traffic import Move
from tests.model.world import Late, Model, State

_QUIET = (ReadEngine, Load, ConfirmEpoch)


def control_moves(model: Model, state: State) -> Iterator[Move]:
    waiting = [each for number, each in model.coordinators.open[state.coordinator].items() if number not in state.taken]
    for sent in waiting:
        yield from _arrive(model, state, sent)
    for number in {each.receiver for each in state.late}:
        yield from _arrive_late(model, state, number)
    for number, engine in enumerate(state.engines):
        if engine.paused == "pausing" and is_quiet(state, number):
            yield from pause_ends(model, state, number, engine)
        if engine.drops and engine.paused == "no" and not is_quiet(state, number):
            yield f"{ENGINES[number]} still drops its handoffs", without_leases(state, number)
    if state.op is not None and (done := finished(model, state, state.op)) is not None:
        for after in done:
            yield from answer(model, after._replace(op=None), Event("answered", ROUTER_NUMBER), "the router is done")
    yield from drained(model, state)
    if not model.coordinators.open[state.coordinator]:
        yield from _time_passes(model, state)
        yield from _ask_for_update(model, state)


def urgent_moves(model: Model, state: State) -> list[Move] | None:
    """What comes to one engine next, where its order among all other moves can't matter; None where there is no such
    engine. A traffic move that a late command would change may as well have come before the coordinator died."""
    for number, sent in sorted(model.coordinators.open[state.coordinator].items()):
        if number >= len(ENGINES) or number in state.taken or sent.ask[0] not in _QUIET:
            continue
        engine = state.engines[number]
        if engine.is_up and (sent.ask[0] is ReadEngine or engine.paused == "yes"):
            return [*_arrive(model, state, sent), *_arrive_late(model, state, number)]
    return None


def _arrive(model: Model, state: State, sent: Sent) -> Iterator[Move]:
    name = f"{_in_short(sent.ask)} for {RECEIVERS[sent.receiver]}"
    for text, after in _carry_out(model, state, Late(*sent), is_awaited=True):
        yield f"{name}{text}", after


def _arrive_late(model: Model, state: State, receiver: int) -> Iterator[Move]:
    for late in [each for each in state.late if each.receiver == receiver]:
        name = f"late {_in_short(late.ask)} for {RECEIVERS[receiver]}"
        left = state._replace(late=state.late - {late})
        for text, after in _carry_out(model, left, late, is_awaited=False):
            yield f"{name}{text}", after


def _carry_out(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    if command.receiver == POOL_NUMBER:
        yield from _at_pool(model, state, command, is_awaited=is_awaited)
    elif command.receiver == ROUTER_NUMBER:
        yield from at_router(model, state, command, is_awaited=is_awaited)
    else:
        yield from at_engine(model, state, command, is_awaited=is_awaited)


def _at_pool(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    ask = read(command.ask)
    assert isinstance(ask, Purge)
    prefix = 0 if model.removed == "epoch in keys" else ask.epoch
    pool = frozenset(each for each in state.pool if each.prefix != prefix)
    check_purged(state.pool, pool, ask.epoch)
    after = state._replace(pool=pool)
    yield from reply(model, after, Event("answered", POOL_NUMBER), f" ({ask.epoch})", is_awaited=is_awaited)


def _time_passes(model: Model, state: State) -> Iterator[Move]:
    """Only while nothing is under way between the coordinator and the others."""
    for after in coordinate(model, state, Event("tick")):
        if after != state:
            yield "the coordinator's timer", after


def _ask_for_update(model: Model, state: State) -> Iterator[Move]:
    setup = model.setup
    if state.asked == setup.updates:
        return
    version = f"v{state.asked + 1}"
    update = Update(
        number=read(model.coordinators.position(state.coordinator)).last_update + 1,
        version=version,
        source={"version": version},
        strategy=setup.strategy,
        in_flight=setup.in_flight,
        load_mode="gpu_fetch",
        limits=model.limits,
    )
    asked = state._replace(asked=state.asked + 1)
    for after in coordinate(model, asked, Event("asked", value=freeze(update))):
        yield f"the trainer asks for {version}", after


def _in_short(ask: Frozen) -> str:
    kind: str = ask[0].__name__
    if ask[0] is ConfirmEpoch:
        return f"{kind} {ask[2]}"
    return kind
