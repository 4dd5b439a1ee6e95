"""The one thing that may go wrong, at any step, and how the others learn of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tests.model.coordinator import Event
from tests.model.core import restarted_core
from tests.model.engine import booted, ended
from tests.model.fleet import COORDINATOR_NUMBER, ENGINES, POOL_NUMBER, ROUTER_NUMBER
from tests.model.invariants import check_fences
from tests.model.request import GONE
from tests.model.steps import coordinate
from tests.model.traffic import Move, answered, fail_legs, happens, no_request, with_engine
from tests.model.world import IDLE, Model, News, Session, State


def fault_moves(model: Model, state: State, touched: Collection[int]) -> Iterator[Move]:
    """The fault itself, while there is one left. `touched`: whom the last move was about; a fault of the others may as
    well have come before it. (The coordinator's death is part of its steps, a failed load one of the load's ends.)"""
    if not state.faults:
        return
    hit = state._replace(faults=0)
    match model.setup.fault:
        case "engine" | "source":
            for number in touched:
                for each in fail_legs(model, hit, number) if number < ROUTER_NUMBER else ():
                    after = with_engine(each, number, ended(each.engines[number]))
                    yield f"{ENGINES[number]} dies", after._replace(news=after.news | {News("ended", number)})
        case "reborn":
            for number in touched:
                for each in fail_legs(model, hit, number) if number < ROUTER_NUMBER else ():
                    after = _boot(model, each, number)
                    yield (
                        f"{ENGINES[number]} restarts behind its port",
                        after._replace(news=after.news | {News("came up", number)}),
                    )
        case "router" if ROUTER_NUMBER in touched:
            yield "the router dies, and starts again", _restarted_router(hit)
        case "store" if POOL_NUMBER in touched:
            yield "the pool is lost", hit._replace(pool=frozenset())
        case "client":
            for number, session in enumerate(state.sessions):
                if session.request != IDLE and not {ROUTER_NUMBER, *_used_by(session)}.isdisjoint(touched):
                    for after in happens(model, hit, number, GONE):
                        yield f"the client of session {number} leaves", after
        case "cancel" if COORDINATOR_NUMBER in touched and (course := model.coordinators.course(state.coordinator)):
            for after in coordinate(model, hit, Event("cancelled", value=course.update.number)):
                yield f"update {course.update.number} is cancelled", after


def touched_by(model: Model, before: State, after: State) -> set[int]:
    """Whom a move was about."""
    found = {number for number in range(len(ENGINES)) if before.engines[number] != after.engines[number]}
    opened, open_now = (model.coordinators.open[each.coordinator] for each in (before, after))
    found |= {number for number in range(len(ENGINES)) if opened.get(number) != open_now.get(number)}
    for one, other in zip(before.sessions, after.sessions, strict=True):
        if one != other:
            found |= {number for each in (one, other) for number in _used_by(each)}
    if before.sessions != after.sessions or before.core != after.core or before.op != after.op:
        found.add(ROUTER_NUMBER)
    if opened.get(ROUTER_NUMBER) != open_now.get(ROUTER_NUMBER):
        found.add(ROUTER_NUMBER)
    if before.pool != after.pool:
        found.add(POOL_NUMBER)
    if before.coordinator != after.coordinator:
        found.add(COORDINATOR_NUMBER)
    return found


def _used_by(session: Session) -> set[int]:
    used = {session.engine} if session.engine >= 0 else set()
    return used | {each.engine for each in (session.leg, session.handoff) if each is not None}


def news_moves(model: Model, state: State) -> Iterator[Move]:
    """What has happened becomes known, and what has to be done is done."""
    for news in state.news:
        number = news.number
        left = state._replace(news=state.news - {news})
        match news.kind:
            case "ended":
                for after in coordinate(model, left, Event("ended", number)):
                    yield f"{ENGINES[number]} was seen to end", after
            case "boots":
                for after in coordinate(model, _boot(model, left, number), Event("came up", number)):
                    yield f"{ENGINES[number]} is up again", after
            case "came up" if number == ROUTER_NUMBER:
                for after in coordinate(model, left, Event("router came up")):
                    yield "the router was seen to be up again", after
            case "came up":
                for after in coordinate(model, left, Event("came up", number)):
                    yield f"{ENGINES[number]} was seen to be up", after
    for number, (engine, replica) in enumerate(zip(state.engines, state.core.replicas, strict=True)):
        if engine.is_up and (engine.life, True) == (replica.life, replica.alive):
            continue
        if not engine.is_up and not replica.alive:
            continue
        for result in model.cores.probe(state.core, number, engine.life if engine.is_up else None):
            yield f"the router probes {ENGINES[number]}", answered(state, result)


def _boot(model: Model, state: State, number: int) -> State:
    epoch = max(state.promised)[0] if model.removed == "boot fence" else None
    after = with_engine(state, number, booted(state.engines[number], epoch=epoch))
    check_fences(after)
    return after


def _restarted_router(state: State) -> State:
    """Its connections are closed: clients see their requests fail, engines end what they had of them in time."""
    legs = {each.leg for each in state.sessions if each.leg is not None}
    lives = [engine.life if engine.is_up else None for engine in state.engines]
    return state._replace(
        core=restarted_core(lives),
        op=None,
        router_order=(0, 0),
        sessions=tuple(no_request(each)._replace(gate="frozen") for each in state.sessions),
        orphans=frozenset(legs),
        late=frozenset(each for each in state.late if each.receiver != ROUTER_NUMBER),
        news=state.news | {News("came up", ROUTER_NUMBER)},
    )
