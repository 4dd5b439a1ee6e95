"""What is told of a coordinator's work: the events of its records, and of the answers to its commands.

`journal.py` writes the ones with the record that they tell of, `runner.py` the others.
"""

from __future__ import annotations

from orchestrator.store.events import Event
from orchestrator.weights import acts
from orchestrator.weights.words import Course, Position


def events_of_record(before: Position | None, after: Position) -> list[Event]:
    """`before`: the record in whose place it comes; None for the first."""
    told = []
    if after.course is not None and (before is None or _place(before.course) != _place(after.course)):
        told.append(_phase_event(after.course))
    if before is not None and before.committed.epoch != after.committed.epoch:
        version, epoch = after.committed.version, after.committed.epoch
        text = f"version {version} is committed, in epoch {epoch}"
        told.append(Event(kind="version_committed", text=text, data={"version": version, "epoch": epoch}))
    return told


def events_of_answer(command: acts.Command) -> list[Event]:
    """Of a command that was carried out."""
    match command.ask:
        case acts.SetGate(gate=gate):
            return [Event(kind="gate", process=command.receiver, text=f"the gate is {gate}", data={"gate": gate})]
        case acts.PublishEpoch(epoch=epoch, version=version, instances=instances):
            data = {"version": version, "epoch": epoch}
            return [
                Event(kind="engine_joined", process=name, text=f"{name} serves {version}, in epoch {epoch}", data=data)
                for name in sorted(instances)
            ]
        case acts.ConfirmEpoch(epoch=None):
            name = command.receiver
            return [Event(kind="engine_fenced", process=name, text=f"{name} takes no requests any more")]
        case _:
            return []


def _place(course: Course | None) -> object:
    return None if course is None else (course.update.number, course.going, course.phase, course.group, course.failures)


def _phase_event(course: Course) -> Event:
    number, version = course.update.number, course.update.version
    who = f"{', '.join(course.group) or 'engines'} join" if course.going == "join" else f"update {number} to {version}"
    why = f" ({course.why})" if course.why else ""
    return Event(
        kind="update_phase",
        text=f"{who}: {course.going}, {course.phase}{why}",
        data={
            "update": number,
            "version": version,
            "going": course.going,
            "phase": course.phase,
            "epoch": course.epoch,
            "group": list(course.group),
        },
    )
