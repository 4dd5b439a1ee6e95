"""The coordinator's journal and the list of updates that were asked for, typed.

`runner.py` writes the one and reads the other; the API and `headrace weights` read both. `store/updates.py` keeps the
texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from connectors.vllm_plugin.weight_rules import LONGEST_WEIGHT_COMMAND
from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.errors import UpdateRefused
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.store.events import Event
from orchestrator.store.records import RecordUnreadable
from orchestrator.store.updates import EndedUpdate, StoredRemark, StoredUpdate, UpdateStore
from orchestrator.weights.told import events_of_record
from orchestrator.weights.words import Outcome, Position

LONGEST_REQUEST = LONGEST_WEIGHT_COMMAND - 1024
"""An engine's command has its order and its limits beside the source."""
PushOutcome = Literal[Outcome, "refused"]
"""refused: asked for, and could not be begun. cancelled: by request, or the job has ended before it had."""
_OUTCOME: TypeAdapter[PushOutcome] = TypeAdapter(PushOutcome)
_POSITION: TypeAdapter[Position] = TypeAdapter(Position)


@dataclass(frozen=True, kw_only=True)
class Push:
    """What somebody asks for: a version, where it is to be had, and how it is to come."""

    version: str
    source: Mapping[str, Any]
    strategy: Strategy
    in_flight: InFlightMode
    load_mode: LoadMode


_PUSH: TypeAdapter[Push] = TypeAdapter(Push)


@dataclass(frozen=True, kw_only=True)
class PushRecord:
    """A push, and what became of it."""

    job: str
    run_id: str
    number: int
    push: Push
    asked_at: float
    begun_at: float | None
    outcome: PushOutcome | None
    """None while it has not ended."""
    why: str
    """Why it was not committed, where it was not."""
    ended_at: float | None
    is_cancelled: bool
    """Somebody has asked that it ends."""


class Journal:
    """Of one coordinator, from its begin on."""

    def __init__(self, store: UpdateStore, job: str, run_id: str) -> None:
        """Raises `CoordinatorReplaced` where the job is in another run, and `RecordUnreadable`."""
        self._store, self._job, self._run_id = store, job, run_id
        self._generation = store.take_over(job, run_id)
        self._newest = position_of(store, job)

    def newest(self) -> Position | None:
        return self._newest

    def record(self, position: Position) -> None:
        """On the disk when this returns. Raises `CoordinatorReplaced` where another one has begun since."""
        ended = position.ended
        end = None if ended is None else _ended(ended.update, ended.outcome, ended.why)
        text, told = _POSITION.dump_json(position).decode(), events_of_record(self._newest, position)
        before = 0 if self._newest is None else self._newest.last_update
        begun = position.last_update if position.last_update > before else None
        self._store.record(self._job, self._run_id, self._generation, text, end, told, begun)
        self._newest = position

    def unended(self) -> PushRecord | None:
        """The push that was asked for and has not ended, begun or not: there is one at most."""
        newest = newest_push(self._store, self._job)
        return newest if newest is not None and newest.outcome is None else None

    def end_unbegun(self, number: int, outcome: PushOutcome, why: str) -> None:
        """Raises `CoordinatorReplaced` as `record` does."""
        self._store.end(self._job, self._run_id, self._generation, _ended(number, outcome, why))

    def note(self, event: Event) -> None:
        """For whoever looks on; nothing depends on it."""
        self._store.events.note(self._job, event)

    def remark(self, text: str) -> None:
        """For whoever looks at the job's history."""
        self._store.remark(self._job, StoredRemark(text=text, at=time.time()))


def _ended(number: int, outcome: PushOutcome, why: str) -> EndedUpdate:
    return EndedUpdate(number=number, outcome=outcome, why=why, at=time.time())


def position_of(store: UpdateStore, job: str) -> Position | None:
    """The newest record; None before the first. Raises `RecordUnreadable`."""
    text = store.position(job)
    with _readable(job):
        return _POSITION.validate_json(text) if text else None


def ask_for(store: UpdateStore, job: str, run_id: str, push: Push) -> int:
    """Its number. Raises `UpdateRefused` where one has not ended yet, where the run does not serve any more, or where
    what is asked for cannot be kept as it is: numbers that are none, half characters, a source that is nested too deep
    or longer than engines take."""
    try:
        request = _PUSH.dump_json(push)
        is_kept = len(request) <= LONGEST_REQUEST and _PUSH.validate_json(request) == push
    except ValueError:
        is_kept = False
    if not is_kept:
        raise UpdateRefused(f"source is no plain JSON of at most {LONGEST_REQUEST} bytes")
    return store.ask(job, run_id, request.decode(), time.time())


def pushes_of(store: UpdateStore, job: str, limit: int) -> list[PushRecord]:
    """The newest of the job's present run, in their order. Raises `RecordUnreadable`, as all do that read pushes of
    one job."""
    return [_push_record(each) for each in store.updates(job, limit)]


def push_of(store: UpdateStore, job: str, number: int) -> PushRecord | None:
    """None where the job's present run has none of this number."""
    found = store.update(job, number)
    return None if found is None else _push_record(found)


def newest_push(store: UpdateStore, job: str) -> PushRecord | None:
    """None where the job's present run has had none."""
    found = store.newest(job)
    return None if found is None else _push_record(found)


def newest_pushes(store: UpdateStore, outcome: PushOutcome | None, job: str | None, limit: int) -> list[PushRecord]:
    """Of one job, or of all, without those that cannot be read; outcome None: those that have not ended. The newest
    first."""
    found = []
    for each in store.newest_of_outcome(outcome or "", job, limit):
        # What another version recorded of one job hides no other's.
        with suppress(RecordUnreadable):
            found.append(_push_record(each))
    return found


def _push_record(stored: StoredUpdate) -> PushRecord:
    with _readable(stored.job):
        return PushRecord(
            job=stored.job,
            run_id=stored.run_id,
            number=stored.number,
            push=_PUSH.validate_json(stored.request),
            asked_at=stored.asked_at,
            begun_at=stored.begun_at,
            outcome=_OUTCOME.validate_python(stored.outcome) if stored.outcome else None,
            why=stored.why,
            ended_at=stored.ended_at,
            is_cancelled=stored.is_cancelled,
        )


@contextmanager
def _readable(job: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise RecordUnreadable(job) from error
