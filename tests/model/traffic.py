"""What clients, workers and engines do with requests.

Each function yields (what happened, the state after it). What a request's flow asks for is carried out by `does`; the
dispatcher's answers go into the mailbox of the request's worker and arrive later, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import request as requests
from tests.model.core import Result
from tests.model.engine import EXPIRED, MIXED, Block, Engine, lets_in
from tests.model.fleet import ENGINES, ROLES
from tests.model.invariants import check_abort, check_kv, check_pair, check_reply, check_saved
from tests.model.request import Asks, Closes, Does, Ends, Happened, Leaves, Sends
from tests.model.world import (
    IDLE,
    GateMoved,
    Granted,
    Handoff,
    Interrupts,
    Key,
    Leg,
    Message,
    Model,
    NotGranted,
    Session,
    State,
)

Move = tuple[str, State]


def traffic_moves(model: Model, state: State) -> Iterator[Move]:
    for number, session in enumerate(state.sessions):
        if session.request == IDLE:
            # One that arrives at a closed gate waits in line: as if it arrived when the gate opens.
            if session.turns and state.core.gate == "open":
                new = _with(state, number, session._replace(request=model.requests.new))
                for after in happens(model, new, number, requests.ARRIVED):
                    yield f"request of session {number} arrives", after
            continue
        if session.mailbox:
            yield from _deliver(model, state, number)
        if session.leg is not None:
            yield from _go_on(model, state, number, session.leg)
        if session.handoff is not None and session.handoff.is_fresh:
            yield from _age(model, state, number, session.handoff)
    for leg in state.orphans:
        yield from _orphan(model, state, leg)
    for number, engine in enumerate(state.engines):
        yield from _save(model, state, number, engine)


def local_moves(model: Model, state: State) -> list[Move] | None:
    """What one worker does next where that arrives at once; None where all have arrived."""
    if model.setup.is_fine:
        return None
    for number, session in enumerate(state.sessions):
        if session.request != IDLE and session.mailbox:
            return list(_deliver(model, state, number))
        if session.leg is not None and session.leg.stage == "air":
            return list(_go_on(model, state, number, session.leg))
    return None


def happens(model: Model, state: State, number: int, happened: Happened, stale: int = -1) -> Iterator[State]:
    """A request's flow is told of something, and what it asks for is done. `stale`: the engine of a stale grant."""
    session = state.sessions[number]
    step = model.requests.step(session.request, session.gate, happened, keeps=session.keeps)
    states = [_with(state, number, session._replace(request=step.number))]
    for does in step.does:
        states = [after for each in states for after in _do(model, each, number, does, stale)]
    yield from states


def told(state: State, number: int, message: Message) -> State:
    """A message for a worker. One without a request has nothing that it could come too late for."""
    session = state.sessions[number]
    if session.request == IDLE:
        gate = message.gate if isinstance(message, GateMoved) else session.gate
        return _with(state, number, session._replace(gate=gate))
    return _with(state, number, session._replace(mailbox=(*session.mailbox, message)))


def answered(state: State, result: Result) -> State:
    """The dispatcher has moved; its answers are on their way."""
    core, answers = result
    state = state._replace(core=core)
    for each in answers:
        message = (
            NotGranted(each.refusal)
            if each.refusal
            else Granted(requests.CURRENT, each.engine, each.life, each.epoch, each.version)
        )
        state = told(state, each.session, message)
    return state


def legs_at(state: State, engine: int) -> list[Leg]:
    """Legs that an engine has accepted."""
    legs = [*(each.leg for each in state.sessions if each.leg is not None), *state.orphans]
    return [each for each in legs if each.engine == engine and each.stage != "air"]


def fail_legs(model: Model, state: State, engine: int) -> Iterator[State]:
    """An engine is gone: its connections are reset."""
    states = [state._replace(orphans=frozenset(each for each in state.orphans if each.engine != engine))]
    for number, session in enumerate(state.sessions):
        if session.leg is not None and session.leg.engine == engine and session.leg.stage != "air":
            states = [after for each in states for after in happens(model, each, number, requests.FAILED)]
    yield from states


def _with(state: State, number: int, session: Session) -> State:
    first, second = state.sessions
    return state._replace(sessions=(session, second) if number == 0 else (first, session))


def _do(model: Model, state: State, number: int, does: Does, stale: int) -> Iterator[State]:
    session = state.sessions[number]
    match does:
        case Asks(epoch=epoch):
            mailbox = tuple(
                each._replace(ticket=requests.STALE) if isinstance(each, Granted) else each
                for each in session.mailbox
                if not isinstance(each, NotGranted)
            )
            handoff = None if epoch is None else session.handoff
            asking = _with(state, number, session._replace(mailbox=mailbox, handoff=handoff))
            yield from (answered(asking, each) for each in model.cores.ask(state.core, number, epoch))
        case Sends(role=role, epoch=epoch, salt=salt, has_handoff=has_handoff):
            version = dict(state.core.epochs).get(epoch, "")
            leg = Leg(session.engine, session.life, role, epoch, version, salt, has_handoff, "air", frozenset())
            check_pair(leg, session.handoff)
            yield _with(state, number, session._replace(leg=leg))
        case Closes():
            assert session.leg is not None
            check_abort(state, session.leg)
            yield _with(state, number, session._replace(leg=None))
        case Ends(ticket=ticket):
            engine = session.engine if ticket == requests.CURRENT else stale
            left = _with(state, number, session._replace(leg=None)) if ticket == requests.CURRENT else state
            yield from (answered(left, each) for each in model.cores.end_leg(state.core, number, engine))
        case Leaves(versions=versions, is_single=is_single):
            is_kept = model.requests.kept[session.request]
            check_reply(session.told, versions, is_single=is_single, is_kept=is_kept)
            said = "kept" if is_kept else "+".join(versions)
            model.replies.add(said if session.told else "an error")
            gate = next((each.gate for each in reversed(session.mailbox) if isinstance(each, GateMoved)), session.gate)
            over = no_request(session)._replace(gate=gate)
            yield from (answered(_with(state, number, over), each) for each in model.cores.leave(state.core, number))


def no_request(session: Session) -> Session:
    """After its request."""
    return Session(turns=session.turns - (session.request != IDLE), request=IDLE, gate=session.gate)


def _deliver(model: Model, state: State, number: int) -> Iterator[Move]:
    session = state.sessions[number]
    message, *rest = session.mailbox
    session = session._replace(mailbox=tuple(rest))
    name = f"worker of session {number}"
    match message:
        case GateMoved(gate=gate):
            keeps = session.keeps and gate != "open"
            after = _with(state, number, session._replace(gate=gate, keeps=keeps))
            if gate != "frozen" and not keeps and model.requests.parked[session.request]:
                yield from ((f"{name} is {gate}", each) for each in happens(model, after, number, requests.THAWED))
            else:
                yield f"{name} is {gate}", after
        case Interrupts(how=how):
            keeps = how == "keep" and model.removed != "nothing is closed while requests are kept"
            after = _with(state, number, session._replace(keeps=session.keeps or keeps))
            for each in happens(model, after, number, ("interrupted", how)):
                yield f"{name} is told to {how} its request", each
        case NotGranted(kind=kind):
            after = _with(state, number, session)
            for each in happens(model, after, number, ("no grant", kind)):
                yield f"{name} is told: {kind}", each
        case Granted(ticket=ticket, engine=engine, life=life, epoch=epoch, version=version):
            if ticket == requests.CURRENT:
                session = session._replace(engine=engine, life=life)
            after = _with(state, number, session)
            granted = ("granted", ticket, ROLES[engine], epoch, version)
            for each in happens(model, after, number, granted, engine):
                yield f"{name} takes the grant of {ENGINES[engine]} in epoch {epoch}", each


def _go_on(model: Model, state: State, number: int, leg: Leg) -> Iterator[Move]:
    engine = state.engines[leg.engine]
    name = f"{leg.role} leg of session {number}"
    if leg.stage == "air":
        if engine.is_up and lets_in(bare(engine), leg.engine, leg.life, leg.epoch):
            stage = "fetching" if leg.has_handoff else "running"
            begun = leg._replace(stage=stage)
            if stage == "running":
                begun = begun._replace(weights=_cached(state, begun))
            yield f"{name} is accepted by {ENGINES[leg.engine]}", _computed(model, state, number, begun)
        else:
            happened = requests.REFUSED if engine.is_up else requests.FAILED
            for after in happens(model, state, number, happened):
                yield f"{name} is refused by {ENGINES[leg.engine]}", after
    elif engine.paused == "yes":
        return
    elif leg.stage == "fetching":
        begun = leg._replace(stage="running", weights=_cached(state, leg) | _fetched(state, number))
        after = _computed(model, state, number, begun)
        after = _with(after, number, after.sessions[number]._replace(handoff=None))
        if model.setup.is_fine:
            yield f"{name} has read its handoff", after
        else:
            yield from _finish_step(model, after, number, begun, f"{name} has read its handoff and")
    else:
        yield from _finish_step(model, state, number, leg, name)


def _finish_step(model: Model, state: State, number: int, leg: Leg, name: str) -> Iterator[Move]:
    leg = leg._replace(weights=leg.weights | {state.engines[leg.engine].weights})
    state = _computed(model, state, number, leg)
    session = state.sessions[number]
    assert session.leg is not None
    leg = session.leg
    if leg.role == "prefill":
        handoff = Handoff(leg.engine, leg.life, leg.epoch, leg.weights, True)
        after = _with(state, number, session._replace(handoff=handoff))
        yield from ((f"{name} ends", each) for each in happens(model, after, number, requests.PREFILLED))
        return
    state = _with(state, number, session._replace(told=session.told | leg.weights))
    if leg.stage == "running" and not model.requests.parked[session.request]:
        session = state.sessions[number]
        state = _with(state, number, session._replace(leg=leg._replace(stage="streaming")))
        yield from ((f"{name} streams", each) for each in happens(model, state, number, requests.STREAMING))
    else:
        yield from ((f"{name} ends", each) for each in happens(model, state, number, requests.ENDED))


def _computed(model: Model, state: State, number: int, leg: Leg) -> State:
    """A leg after a step: what it stands on is right, and what it has computed is in the engine's cache."""
    session = state.sessions[number]
    engine = state.engines[leg.engine]
    is_kept = model.requests.kept[session.request]
    check_kv(leg, is_kept=is_kept)
    if is_kept:
        # Which versions no longer matters, and its blocks are of an epoch that the engine leaves.
        leg = leg._replace(weights=frozenset({MIXED}))
    else:
        new = {Block(leg.epoch, leg.salt, each) for each in leg.weights}
        if not new <= engine.blocks:
            state = with_engine(state, leg.engine, engine._replace(blocks=engine.blocks | new))
    return _with(state, number, session._replace(leg=leg))


def _cached(state: State, leg: Leg) -> frozenset[str]:
    """What a leg may find in the local cache and in the pool, and computes the rest from."""
    engine = state.engines[leg.engine]
    local = {each.weights for each in engine.blocks if each.salt == leg.salt}
    pool = {each.weights for each in state.pool if each.salt == leg.salt and each.prefix in (0, engine.epoch)}
    return frozenset(local | pool | {engine.weights})


def _fetched(state: State, number: int) -> frozenset[str]:
    handoff = state.sessions[number].handoff
    assert handoff is not None, "a leg without its handoff"
    source = state.engines[handoff.engine]
    if not source.is_up or source.life != handoff.life:
        return frozenset()  # It can't be read, and the prompt is computed here.
    return handoff.weights if handoff.is_fresh else frozenset({EXPIRED})


def _age(model: Model, state: State, number: int, handoff: Handoff) -> Iterator[Move]:
    """A handoff's lease runs out. While a leg is on its way with it the router's margin covers it, and once the leg
    is accepted the engine keeps the lease alive, unless it is paused."""
    session = state.sessions[number]
    leg = session.leg
    if leg is not None and leg.has_handoff and state.engines[leg.engine].paused != "yes":
        return
    after = _with(state, number, session._replace(handoff=handoff._replace(is_fresh=False)))
    for each in happens(model, after, number, requests.AGED):
        yield f"lease of session {number}'s handoff is over", each


def _orphan(model: Model, state: State, leg: Leg) -> Iterator[Move]:
    """A leg of a router that is gone: it may still be accepted, until its engine notices."""
    left = state._replace(orphans=state.orphans - {leg})
    yield f"{leg.role} leg of the router before ends", left
    engine = state.engines[leg.engine]
    if leg.stage == "air" and engine.is_up and lets_in(bare(engine), leg.engine, leg.life, leg.epoch):
        begun = leg._replace(stage="running", weights=_cached(state, leg))
        check_kv(begun, is_kept=False)
        yield f"{leg.role} leg of the router before is accepted", left._replace(orphans=left.orphans | {begun})


def _save(model: Model, state: State, number: int, engine: Engine) -> Iterator[Move]:
    """A block that was computed at any time is written to the pool now."""
    if not engine.is_up or engine.epoch is None:
        return
    for block in engine.blocks:
        if block.epoch != engine.epoch and model.removed != "no saves from older requests":
            continue
        key = key_of(model, engine.epoch, block)
        if key not in state.pool:
            check_saved(state, engine.epoch, key)
            yield f"{ENGINES[number]} saves a block of epoch {block.epoch}", state._replace(pool=state.pool | {key})


def key_of(model: Model, epoch: int, block: Block) -> Key:
    return Key(0 if model.removed == "epoch in keys" else epoch, block.salt, block.epoch, block.weights)


def with_engine(state: State, number: int, engine: Engine) -> State:
    engines = list(state.engines)
    engines[number] = engine
    return state._replace(engines=tuple(engines))


def bare(engine: Engine) -> Engine:
    """As its fence sees it."""
    return engine._replace(blocks=frozenset())
