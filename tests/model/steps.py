"""The coordinator's steps: what it is told goes in, its records, commands and restarts are done or put on their way.

A coordinator that dies does so between two of these acts. `control.py`, `at_engine.py` and `at_router.py` answer it.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.weights.acts import ReadEngine, ReadRouter
from tests.model.coordinator import Act, Event, Finished, Outcome, Recorded, Restarted, Sent
from tests.model.engine import ended
from tests.model.fleet import ENGINES, ROUTER_NUMBER
from tests.model.invariants import check_committed, check_epochs
from tests.model.plain import Frozen, read
from tests.model.traffic import Move, fail_legs, with_engine
from tests.model.world import Late, Model, News, State

_ANSWERS = ("answered", "refused", "lost", "engine read", "router read")


def coordinate(model: Model, state: State, event: Event) -> Iterator[State]:
    """The coordinator is told of something, and what it does then is done."""
    for outcome in model.coordinators.step(state.coordinator, event):
        yield from _acted(model, state, outcome, event)
        if model.setup.fault == "coordinator" and state.faults:
            yield from _cut(model, state, outcome, event)


def _acted(model: Model, state: State, outcome: Outcome, event: Event) -> Iterator[State]:
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


def answer(model: Model, state: State, event: Event, name: str) -> Iterator[Move]:
    """A command that was taken is answered, if anyone waits for it."""
    if event.receiver not in state.taken:
        yield name, state
        return
    for after in coordinate(model, state, event):
        yield name, after


def reply(model: Model, state: State, event: Event, text: str, *, is_awaited: bool) -> Iterator[Move]:
    if not is_awaited:
        yield text, state
        return
    for after in coordinate(model, state, event):
        yield text, after


def overtaken(model: Model, state: State, receiver: int) -> State:
    """A command was taken that somebody waits for: all that nobody waits for are older than it, unless a coordinator
    has begun anew under the numbers of the one before."""
    if model.removed in ("fencing numbers", "journal before act"):
        return state
    return state._replace(late=frozenset(each for each in state.late if each.receiver != receiver))
