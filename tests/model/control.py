"""What the coordinator does, and how engines, the router and the pool carry its commands out.

A command, what it does and its answer are one move where the order of the three can't matter: a coordinator that dies
between the first two leaves a late command, which may still be carried out, and one that dies between the last two has
only forgotten the answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.weights.acts import (
    ConfirmEpoch,
    Drain,
    HandleInFlight,
    Load,
    PublishEpoch,
    Purge,
    ReadEngine,
    ReadRouter,
    SetGate,
)
from orchestrator.weights.words import ReplicaFacts, RouterFacts, Update
from router.core.gate import Gate, GateState
from tests.model.coordinator import Act, Event, Finished, Outcome, Recorded, Restarted, Sent
from tests.model.core import Result
from tests.model.engine import Block, Engine, LoadEnd, ended, obey
from tests.model.fleet import ENGINES, NUMBER, POOL_NUMBER, RECEIVERS, ROUTER_NUMBER, instance, life_of
from tests.model.invariants import check_committed, check_epochs, check_fences, check_purged, check_saved, check_written
from tests.model.plain import Frozen, freeze, read
from tests.model.traffic import Move, answered, fail_legs, key_of, legs_at, told, with_engine
from tests.model.world import GateMoved, Granted, Interrupts, Late, Model, News, Op, State

_ANSWERS = ("answered", "refused", "lost", "engine read", "router read")
_QUIET = (ReadEngine, Load, ConfirmEpoch)


def control_moves(model: Model, state: State) -> Iterator[Move]:
    waiting = [each for number, each in model.coordinators.open[state.coordinator].items() if number not in state.taken]
    for sent in waiting:
        yield from _arrive(model, state, sent)
    for number in {each.receiver for each in state.late}:
        yield from _arrive_late(model, state, number)
    for number, engine in enumerate(state.engines):
        if engine.paused == "pausing" and _is_quiet(state, number):
            yield from _paused(model, state, number, engine)
    if state.op is not None and (done := _finished(model, state, state.op)) is not None:
        for after in done:
            yield from _answer(model, after._replace(op=None), Event("answered", ROUTER_NUMBER), "the router is done")
    yield from _drained(model, state)
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


def coordinate(model: Model, state: State, event: Event) -> Iterator[State]:
    """The coordinator is told of something, and what it does then is done."""
    for outcome in model.coordinators.step(state.coordinator, event):
        yield from acted(model, state, outcome, event)
        if model.setup.fault == "coordinator" and state.faults:
            yield from _cut(model, state, outcome, event)


def acted(model: Model, state: State, outcome: Outcome, event: Event) -> Iterator[State]:
    before, after = model.coordinators.open[state.coordinator], model.coordinators.open[outcome.number]
    sent = {act.receiver for act in outcome.acts if isinstance(act, Sent)}
    is_answer = event.kind in _ANSWERS
    gone = [
        each
        for number, each in before.items()
        if (number in sent or number not in after) and not (is_answer and number == event.receiver)
    ]
    late = {Late(*each) for each in gone if each.receiver not in state.taken and each.receiver != ROUTER_NUMBER}
    over = sent | {each.receiver for each in gone} | ({event.receiver} if is_answer else set())
    state = state._replace(coordinator=outcome.number, taken=state.taken - over, late=_of_interest(state.late | late))
    states = [state]
    for act in outcome.acts:
        states = [done for each in states for done in _act(model, each, act)]
    yield from states


def _restarted(model: Model, state: State, position: Frozen, sent: list[Sent]) -> Iterator[State]:
    """Another life, from the journal's newest record. What the one before has sent may still arrive."""
    late = _of_interest(state.late | {Late(*each) for each in sent})
    gone = state._replace(late=late, taken=frozenset(), faults=0)
    for outcome in model.coordinators.start(position):
        begun = gone._replace(coordinator=outcome.number)
        states = [begun]
        for act in outcome.acts:
            states = [done for each in states for done in _act(model, each, act)]
        yield from states


def _cut(model: Model, state: State, outcome: Outcome, event: Event) -> Iterator[State]:
    """The coordinator dies right after a record, before what follows, or after its last act. What others do until its
    next step they may as well do after its death, so it need not die between its steps."""
    acts = outcome.acts
    is_answer = event.kind in _ANSWERS
    waiting = [
        each
        for number, each in model.coordinators.open[state.coordinator].items()
        if number not in state.taken and not (is_answer and number == event.receiver)
    ]
    for end in sorted({len(acts), *(place + 1 for place, act in enumerate(acts) if isinstance(act, Recorded))}):
        states = [state]
        for act in acts[:end]:
            states = [after for each in states for after in _act(model, each, act)]
        records = [act.position for act in acts[:end] if isinstance(act, Recorded)]
        if model.removed == "journal before act" and end == len(acts):
            records = []  # Carried out, and not written.
        position = records[-1] if records else model.coordinators.position(state.coordinator)
        sent = [*waiting, *(act for act in acts[:end] if isinstance(act, Sent))]
        for each in states:
            yield from _restarted(model, each, position, sent)


def _of_interest(late: frozenset[Late]) -> frozenset[Late]:
    return frozenset(each for each in late if each.ask[0] not in (ReadEngine, ReadRouter))


def _act(model: Model, state: State, act: Act) -> Iterator[State]:
    match act:
        case Recorded(position=position):
            yield _recorded(model, state, position)
        case Restarted(engine=number):
            if not state.engines[number].is_up:
                yield state._replace(news=state.news | {News("boots", number)})
                return
            news = (state.news - {News("came up", number), News("ended", number)}) | {News("boots", number)}
            for each in fail_legs(model, state, number):
                yield with_engine(each, number, ended(each.engines[number]))._replace(news=news)
        case Sent() | Finished():
            yield state


def _recorded(model: Model, state: State, frozen: Frozen) -> State:
    position = read(frozen)
    course = position.course
    if course is not None and course.phase == "commit" and course.going == "forward":
        away = model.coordinators.away(state.coordinator)
        unseen = {each.number for each in state.news}
        present = [each for each in range(len(ENGINES)) if ENGINES[each] not in away and each not in unseen]
        check_committed(state, course.update.version, present)
    promised = state.promised | set(position.epochs.items())
    if promised == state.promised:
        return state
    check_epochs(promised)
    return state._replace(promised=promised)


def _answer(model: Model, state: State, event: Event, name: str) -> Iterator[Move]:
    """A command that was taken is answered, if anyone waits for it."""
    if event.receiver not in state.taken:
        yield name, state
        return
    for after in coordinate(model, state, event):
        yield name, after


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
        yield from _at_router(model, state, command, is_awaited=is_awaited)
    else:
        yield from _at_engine(model, state, command, is_awaited=is_awaited)


def _reply(model: Model, state: State, event: Event, text: str, *, is_awaited: bool) -> Iterator[Move]:
    if not is_awaited:
        yield text, state
        return
    for after in coordinate(model, state, event):
        yield text, after


# Engines


def _at_engine(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    number, engine = command.receiver, state.engines[command.receiver]
    if not engine.is_up:
        yield from _reply(model, state, Event("lost", number), ": nobody is there", is_awaited=is_awaited)
        return
    legs = len(legs_at(state, number))
    is_load = command.ask[0] is Load
    ends: list[LoadEnd] = ["done"]
    if is_load and model.setup.fault == "load" and state.faults:
        ends += ["untouched", "torn"]
    for end in ends:
        at_once = model.removed == "pause answer before the next step"
        done = obey(
            engine._replace(blocks=frozenset()), number, command.attempt, command.ask, legs=legs,
            is_quiet=_is_quiet(state, number) and not at_once, end=end,
            hears_all_ranks=model.removed != "verdict from all ranks",
        )  # fmt: skip
        if done.is_written:
            check_written(number, legs, is_paused=engine.paused == "yes")
        after = with_engine(state, number, done.engine._replace(blocks=engine.blocks))
        after = opened(model, after, number) if done.engine.is_open and not engine.is_open else after
        if end != "done":
            after = after._replace(faults=0)
        check_fences(after)
        if done.is_taken and is_awaited:
            after = _overtaken(model, after, number)
        text = "" if end == "done" else f" ({end})"
        answer = done.answer
        if at_once and (answer is None or answer.kind == "engine read"):
            answer = Event("answered", number) if answer is None else _as_if_paused(answer, done.engine)
        if answer is not None:
            yield from _reply(model, after, answer, f"{text}: {answer.kind}", is_awaited=is_awaited)
        else:
            taken = after.taken | {number} if is_awaited else after.taken
            yield f"{text}: begins", after._replace(taken=taken)


def _overtaken(model: Model, state: State, receiver: int) -> State:
    """A command was taken that somebody waits for: all that nobody waits for are older than it, unless a coordinator
    has begun anew under the numbers of the one before."""
    if model.removed in ("fencing numbers", "journal before act"):
        return state
    return state._replace(late=frozenset(each for each in state.late if each.receiver != receiver))


def _as_if_paused(answer: Event, engine: Engine) -> Event:
    facts = read(answer.value)
    return answer._replace(value=freeze(facts.__class__(**{**vars(facts), "paused": engine.paused != "no"})))


def _is_quiet(state: State, number: int) -> bool:
    """No handoff of this engine is left to be read: what its pause waits for."""
    life = state.engines[number].life
    handoffs = [each.handoff for each in state.sessions if each.handoff is not None]
    return not any((each.engine, each.life, each.is_fresh) == (number, life, True) for each in handoffs)


def _paused(model: Model, state: State, number: int, engine: Engine) -> Iterator[Move]:
    after = with_engine(state, number, engine._replace(paused="yes"))
    yield from _answer(model, after, Event("answered", number), f"{ENGINES[number]} has paused")


def opened(model: Model, state: State, number: int) -> State:
    """An engine begins to serve an epoch: other clients' requests fill its cache and the pool at once."""
    engine = state.engines[number]
    assert engine.epoch is not None
    block = Block(engine.epoch, engine.epoch, engine.weights)
    key = key_of(model, engine.epoch, block)
    check_saved(state, engine.epoch, key)
    filled = with_engine(state, number, engine._replace(blocks=engine.blocks | {block}))
    return filled._replace(pool=filled.pool | {key})


# The router


def _at_router(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    ask = read(command.ask)
    if isinstance(ask, ReadRouter):
        event = Event("router read", ROUTER_NUMBER, freeze(_router_facts(state)))
        yield from _reply(model, state, event, "", is_awaited=is_awaited)
        return
    if isinstance(ask, SetGate | HandleInFlight) and state.op is not None:
        return  # It waits until the one before is done.
    is_refused = not _accepts(state.router_order, command.attempt) and model.removed != "fencing numbers"
    if is_refused or (isinstance(ask, HandleInFlight) and state.core.gate != "holding"):
        yield from _reply(model, state, Event("refused", ROUTER_NUMBER), ": refused", is_awaited=is_awaited)
        return
    state = state._replace(router_order=command.attempt)
    if is_awaited:
        state = _overtaken(model, state, ROUTER_NUMBER)
    match ask:
        case PublishEpoch(epoch=epoch, version=version, instances=instances):
            lives = tuple((NUMBER[name], life_of(each)) for name, each in sorted(instances.items()))
            results = model.cores.publish(state.core, epoch, version, lives)
            kind = "answered" if results else "refused"
            for result in results or [(state.core, ())]:
                after = answered(state, result)
                yield from _reply(model, after, Event(kind, ROUTER_NUMBER), f": {kind}", is_awaited=is_awaited)
        case Drain(name=name, draining=draining):
            for result in model.cores.drain(state.core, NUMBER[name], draining):
                after = answered(state, result)
                if draining and is_awaited:
                    yield f" ({name})", after._replace(taken=after.taken | {ROUTER_NUMBER})
                else:
                    event = Event("answered", ROUTER_NUMBER)
                    yield from _reply(model, after, event, f" ({name})", is_awaited=is_awaited)
        case SetGate(gate=gate):
            for after in _move_gate(model, state, gate):
                taken = after.taken | {ROUTER_NUMBER} if is_awaited else after.taken
                yield f" ({gate})", after._replace(op=Op(gate, None), taken=taken)
        case HandleInFlight(mode=mode):
            if mode != "wait":
                for number in range(len(state.sessions)):
                    state = told(state, number, Interrupts(mode))
            taken = state.taken | {ROUTER_NUMBER} if is_awaited else state.taken
            yield "", state._replace(op=Op(None, mode), taken=taken)


def _accepts(taken: tuple[int, int], attempt: tuple[int, int]) -> bool:
    gate = Gate()
    gate.take((*taken, 0))
    return gate.accepts((*attempt, 1))


def _move_gate(model: Model, state: State, gate: GateState) -> list[State]:
    """The dispatcher closes before the workers know, and opens after."""
    results: list[Result] = [(state.core, ())]
    if gate != "open":
        results = model.cores.set_gate(state.core, gate)
    states = [answered(state, each) for each in results]
    for number in range(len(state.sessions)):
        states = [told(each, number, GateMoved(gate)) for each in states]
    return states


def _finished(model: Model, state: State, op: Op) -> list[State] | None:
    """The states in which a command of the router has been carried out; None while it is not."""
    mailboxes = [each.mailbox for each in state.sessions]
    reached = [not any(isinstance(message, GateMoved | Interrupts) for message in box) for box in mailboxes]
    everyone = any(reached) if model.removed == "hold acknowledged by all workers" else all(reached)
    if op.in_flight == "wait":
        is_busy = any(
            each.leg is not None or any(isinstance(message, Granted) for message in each.mailbox)
            for each in state.sessions
        )
        between = any(place is not None and (place.waits_for or -1) >= 0 for place in state.core.places)
        return None if is_busy or between else [state]
    if not everyone:
        return None
    if op.gate == "open":
        return [answered(state, each) for each in model.cores.set_gate(state.core, "open")]
    is_settled = not any(each.leg is not None and each.leg.stage == "air" for each in state.sessions)
    return [state] if op.gate is None or is_settled else None


def _drained(model: Model, state: State) -> Iterator[Move]:
    sent = model.coordinators.open[state.coordinator].get(ROUTER_NUMBER)
    if sent is None or ROUTER_NUMBER not in state.taken or sent.ask[0] is not Drain:
        return
    drain = read(sent.ask)
    held = [each for place in state.core.places if place is not None for each in place.held]
    if drain.timeout_s == 0 or NUMBER[drain.name] not in held:
        kind = "answered" if NUMBER[drain.name] not in held else "refused"
        for after in coordinate(model, state, Event(kind, ROUTER_NUMBER)):
            yield f"drain of {drain.name}: {kind}", after


def _router_facts(state: State) -> RouterFacts:
    replicas = {
        name: ReplicaFacts(
            instance=instance(number, each.life) if each.life >= 0 else "", epoch=each.epoch, draining=each.draining
        )
        for number, (name, each) in enumerate(zip(ENGINES, state.core.replicas, strict=True))
    }
    return RouterFacts(gate=state.core.gate, replicas=replicas)


# The pool, time and the trainer


def _at_pool(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    ask = read(command.ask)
    assert isinstance(ask, Purge)
    prefix = 0 if model.removed == "epoch in keys" else ask.epoch
    pool = frozenset(each for each in state.pool if each.prefix != prefix)
    check_purged(state.pool, pool, ask.epoch)
    after = state._replace(pool=pool)
    yield from _reply(model, after, Event("answered", POOL_NUMBER), f" ({ask.epoch})", is_awaited=is_awaited)


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
