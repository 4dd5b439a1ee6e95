"""Commands at an engine: its fence decides, `engine.py` does it, and the coordinator is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from orchestrator.weights.acts import Load, Pause, Resume
from tests.model.coordinator import Event
from tests.model.engine import Block, Engine, LoadEnd, Obeyed, obey
from tests.model.fleet import ENGINES, NUMBER
from tests.model.invariants import check_fences, check_saved, check_written
from tests.model.plain import freeze, read
from tests.model.steps import answer, overtaken, reply
from tests.model.traffic import Move, key_of, legs_at, with_engine
from tests.model.world import Late, Model, State


def at_engine(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    number, engine = command.receiver, state.engines[command.receiver]
    if not engine.is_up:
        yield from reply(model, state, Event("lost", number), ": nobody is there", is_awaited=is_awaited)
        return
    legs = len(legs_at(state, number))
    at_once = model.removed == "pause answer before the next step"
    drops = command.ask[0] is Pause and read(command.ask).drops_handoffs
    quiet = [(drops or is_quiet(state, number)) and not at_once]
    if drops and model.setup.fault == "cancel":
        # A slow save holds it up as well. Only a fleet that is called off resumes meanwhile.
        quiet.append(False)
    ends: list[LoadEnd] = ["done"]
    brought = None
    if command.ask[0] is Load:
        brought = _brought(model, state, read(command.ask))
        ends = ["untouched"] if brought is None else ends
        if model.setup.fault == "load" and state.faults:
            ends += ["untouched", "torn"]
    for end, is_ended_at_once in product(ends, quiet):
        done = obey(
            engine._replace(blocks=frozenset()), number, command.attempt, command.ask, legs=legs,
            is_quiet=is_ended_at_once, end=end, brought=brought or "",
            hears_all_ranks=model.removed != "verdict from all ranks",
        )  # fmt: skip
        if done.is_written:
            check_written(number, legs, is_paused=engine.paused == "yes")
        after = with_engine(state, number, _dropping(model, done.engine._replace(blocks=engine.blocks), command, done))
        after = without_leases(after, number) if drops and done.is_taken else after
        after = opened(model, after, number) if done.engine.is_open and not engine.is_open else after
        if end != ends[0]:
            after = after._replace(faults=0)
        check_fences(after)
        if done.is_taken and is_awaited:
            after = overtaken(model, after, number)
        text = "" if end == "done" else f" ({end})"
        told = done.answer
        if at_once and (told is None or told.kind == "engine read"):
            told = Event("answered", number) if told is None else _as_if_paused(told, done.engine)
        if told is not None:
            yield from reply(model, after, told, f"{text}: {told.kind}", is_awaited=is_awaited)
        else:
            taken = after.taken | {number} if is_awaited else after.taken
            yield f"{text}: begins", after._replace(taken=taken)


def _dropping(model: Model, engine: Engine, command: Late, done: Obeyed) -> Engine:
    """With what a pause or a resume that was obeyed does to the dropping of handoffs: it goes on as long as the pause
    waits, and no longer than to the next resume."""
    if not done.is_taken:
        return engine
    if command.ask[0] is Pause:
        return engine._replace(drops=engine.paused == "pausing" and read(command.ask).drops_handoffs)
    if command.ask[0] is Resume and model.removed != "drops end with the pause":
        return engine._replace(drops=False)
    return engine


def without_leases(state: State, number: int) -> State:
    """What still reads a handoff of this engine would read other requests' blocks."""
    sessions = tuple(
        each._replace(handoff=each.handoff._replace(is_fresh=False))
        if each.handoff is not None and each.handoff.engine == number
        else each
        for each in state.sessions
    )
    return state._replace(sessions=sessions)


def _brought(model: Model, state: State, load: Load) -> str | None:
    """What really comes from a source; None where nothing does."""
    version = str(load.source["version"])
    if load.peer:
        peer = state.engines[NUMBER[load.peer]]
        return peer.weights if peer.is_up and peer.serves and peer.version == version else None
    committed = read(model.coordinators.position(state.coordinator)).committed
    is_gone = model.setup.fault == "source" and not state.faults and version == committed.version
    return None if is_gone else version


def _as_if_paused(told: Event, engine: Engine) -> Event:
    return told._replace(value=freeze(replace(read(told.value), paused=engine.paused != "no")))


def is_quiet(state: State, number: int) -> bool:
    """No handoff of this engine is left to be read: what its pause waits for."""
    life = state.engines[number].life
    handoffs = [each.handoff for each in state.sessions if each.handoff is not None]
    return not any((each.engine, each.life, each.is_fresh) == (number, life, True) for each in handoffs)


def pause_ends(model: Model, state: State, number: int, engine: Engine) -> Iterator[Move]:
    after = with_engine(state, number, engine._replace(paused="yes", drops=False))
    yield from answer(model, after, Event("answered", number), f"{ENGINES[number]} has paused")


def opened(model: Model, state: State, number: int) -> State:
    """An engine begins to serve an epoch: other clients' requests fill its cache and the pool at once."""
    engine = state.engines[number]
    assert engine.epoch is not None
    block = Block(engine.epoch, engine.epoch, engine.weights)
    key = key_of(model, engine.epoch, block)
    check_saved(state, engine.epoch, key)
    filled = with_engine(state, number, engine._replace(blocks=engine.blocks | {block}))
    return filled._replace(pool=filled.pool | {key})
