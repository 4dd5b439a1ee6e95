"""Every state that can be reached, breadth first, so that the story of a violation is a shortest one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.model.at_engine import opened
from tests.model.control import control_moves, urgent_moves
from tests.model.faults import fault_moves, news_moves, touched_by
from tests.model.fleet import ENGINES
from tests.model.traffic import Move, local_moves, traffic_moves
from tests.model.world import IDLE, Model, State, Violated


@dataclass
class Found:
    """What an exploration has found."""

    states: int = 0
    is_whole: bool = True
    """False: the time was over before the last state."""
    violation: str = ""
    story: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    """How the runs end that do."""
    replies: list[str] = field(default_factory=list)
    """Kinds of replies that were given."""


def moves(model: Model, state: State) -> Iterator[Move]:
    """What can happen next, each with what follows from it at once, and with the fault that it may meet."""
    for text, after in _all_moves(model, state):
        for whole, end in _to_the_end(model, text, after):
            yield whole, end
            if end.faults:
                for fault, hit in fault_moves(model, end, touched_by(model, state, end)):
                    yield from _to_the_end(model, f"{whole}; {fault}", hit)


def _all_moves(model: Model, state: State) -> Iterator[Move]:
    urgent = urgent_moves(model, state)
    if urgent is not None:
        yield from urgent
        return
    yield from control_moves(model, state)
    yield from traffic_moves(model, state)
    yield from news_moves(model, state)


def _to_the_end(model: Model, text: str, state: State) -> Iterator[Move]:
    following = local_moves(model, state)
    if following is None and not state.faults:
        following = urgent_moves(model, state)
    if following is None:
        yield text, state
        return
    for more, after in following:
        yield from _to_the_end(model, f"{text}; {more}", after)


def explore(model: Model, *, limit_s: float, goal: int = 10**9) -> Found:
    """`goal`: give up after so many states."""
    began = time.monotonic()
    state = model.first()
    for number in range(len(ENGINES)):
        state = opened(model, state, number)
    first = model.canonical(state)
    before: dict[int, int] = {hash(first): 0}
    found = Found(states=1)
    layer = [first]
    while layer and found.is_whole:
        following: list[State] = []
        for state in layer:
            try:
                is_end = True
                for _, after in moves(model, state):
                    is_end = False
                    after = model.canonical(after)
                    key = hash(after)
                    if key not in before:
                        before[key] = hash(state)
                        following.append(after)
                if is_end:
                    found.ends[_ending(model, state)] += 1
            except Violated as violated:
                found.violation = str(violated)
            if found.violation:
                found.story = _story(model, first, before, hash(state))
                found.violation = found.story[-1]
                found.states, found.seconds = len(before), time.monotonic() - began
                return found
        layer = following
        found.is_whole = time.monotonic() - began < limit_s and len(before) < goal
    found.is_whole, found.replies = not layer, sorted(model.replies)
    found.states, found.seconds = len(before), time.monotonic() - began
    return found


def _ending(model: Model, state: State) -> str:
    """Raises `Violated` where requests or an update are stuck for good."""
    course = model.coordinators.course(state.coordinator)
    if course is not None or any(each.request != IDLE for each in state.sessions):
        raise Violated(f"nothing can happen any more: {course}, {state.sessions}")
    position = model.coordinators.position(state.coordinator)
    return f"{position[1][2]} in epoch {position[1][1]}, gate {state.core.gate}"


def _story(model: Model, first: State, before: dict[int, int], last: int) -> list[str]:
    """One line per step, found again along the keys of the states."""
    keys = [last]
    while before[keys[-1]]:
        keys.append(before[keys[-1]])
    story, state = [], first
    for key in keys[-2::-1]:
        # Names stay what they were, although the states were explored under others, unless a tie was broken otherwise.
        if (step := _step_to(model, state, key)) is None:
            story.append("(from here on equal replicas may have each other's names)")
            step = _step_to(model, model.canonical(state), key)
        assert step is not None
        text, state = step
        story += text.split("; ")
    try:
        if not list(moves(model, state)):
            _ending(model, state)
    except Violated as violated:
        story.append(str(violated))
    return story


def _step_to(model: Model, state: State, key: int) -> Move | None:
    return next(((text, each) for text, each in moves(model, state) if hash(model.canonical(each)) == key), None)
