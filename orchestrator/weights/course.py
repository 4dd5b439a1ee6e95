"""How the journal's position moves: each function takes one position and gives the next."""

from __future__ import annotations

from dataclasses import replace

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.plan.weights import Limits
from orchestrator.weights.phases import first_phase
from orchestrator.weights.words import Commitment, Course, Ended, Going, Outcome, Phase, Position, Update

_OUTCOMES: dict[Going, Outcome] = {"forward": "committed", "back": "rolled_back", "off": "called_off"}
"""Joining is no update and has none."""


def new_attempt(position: Position) -> Position:
    return replace(position, attempt=position.attempt + 1)


def begin(position: Position, update: Update) -> Position:
    begun = replace(position, last_update=update.number, attempt=1)
    return _with_new_epoch(begun, _course(update, "forward", epoch=0, epoch_before=position.committed.epoch))


def begin_join(position: Position, limits: Limits, load_mode: LoadMode) -> Position:
    """No update, but it goes the same way as a rolling one, under the number of the last."""
    committed = position.committed
    update = Update(
        number=position.last_update,
        version=committed.version,
        source=committed.source,
        strategy="rolling",
        in_flight="wait",
        load_mode=load_mode,
        limits=limits,
    )
    course = _course(update, "join", epoch=committed.epoch, epoch_before=committed.epoch)
    return replace(new_attempt(position), course=course)


def enter(position: Position, phase: Phase) -> Position:
    """The version moves here and nowhere else: by the record that the update is at `commit`."""
    course = _of(position)
    moved = replace(position, course=replace(course, phase=phase, is_written=course.is_written or phase == "load"))
    if phase != "commit":
        return moved
    committed = replace(position.committed, epoch=course.epoch)
    if course.going == "forward":
        committed = Commitment(epoch=course.epoch, version=course.update.version, source=course.update.source)
    return replace(moved, committed=committed)


def choose(position: Position, group: tuple[str, ...]) -> Position:
    return replace(position, course=replace(_of(position), group=group))


def retry(position: Position) -> Position:
    """The same way again. A rolling update keeps its epoch: engines that hold its version serve in it already."""
    course = _of(position)
    again = replace(course, failures=course.failures + 1)
    if course.update.strategy == "rolling":
        return replace(new_attempt(position), course=again)
    return _with_new_epoch(new_attempt(position), again)


def call_off(position: Position, why: str, *, is_cancelled: bool) -> Position:
    course = _of(position)
    phase = first_phase(course.update.strategy, "off")
    off = replace(course, going="off", phase=phase, epoch=position.committed.epoch, why=why, is_cancelled=is_cancelled)
    return replace(new_attempt(position), course=off)


def turn_back(position: Position, why: str) -> Position:
    course = _of(position)
    phase = first_phase(course.update.strategy, "back")
    back = replace(course, going="back", phase=phase, group=(), failures=0, why=why)
    return _with_new_epoch(new_attempt(position), back)


def outcome_of(course: Course) -> Outcome:
    """Once its way was gone to its end."""
    return "cancelled" if course.is_cancelled else _OUTCOMES[course.going]


def end(position: Position, outcome: Outcome, why: str) -> Position:
    return replace(position, ended=Ended(update=_of(position).update.number, outcome=outcome, why=why))


def leave(position: Position) -> Position:
    return replace(position, course=None)


def wiped(position: Position) -> Position:
    """Nothing of an older epoch is in the pool any more."""
    committed = position.committed
    return replace(position, epochs={committed.epoch: committed.version})


def purged(position: Position, epoch: int) -> Position:
    return replace(position, epochs={each: name for each, name in position.epochs.items() if each != epoch})


def _of(position: Position) -> Course:
    assert position.course is not None
    return position.course


def _course(update: Update, going: Going, *, epoch: int, epoch_before: int) -> Course:
    phase = first_phase(update.strategy, going)
    return Course(
        update=update,
        going=going,
        phase=phase,
        epoch=epoch,
        epoch_before=epoch_before,
        group=(),
        failures=0,
        is_written=False,
        why="",
        is_cancelled=False,
    )


def _with_new_epoch(position: Position, course: Course) -> Position:
    epoch = position.last_epoch + 1
    version = course.update.version if course.going == "forward" else position.committed.version
    return replace(
        position,
        last_epoch=epoch,
        epochs={**position.epochs, epoch: version},
        course=replace(course, epoch=epoch),
    )
