"""What a process finds that goes on with a job which it did not find at its beginning: said as an event of the job.

`orchestrator/service.py` adopts starts and stops, `orchestrator/supervision.py` jobs that run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from deploy.backend import Backend
from orchestrator.store.events import Event
from orchestrator.store.jobs import JobStore
from orchestrator.store.records import StoredJob
from orchestrator.supervisor.interfaces import ReadinessProbe
from orchestrator.supervisor.state import UnitState
from orchestrator.supervisor.view import UnitView, look_at_units

WORDS: dict[UnitState, str] = {
    "ready": "ready",
    "starting": "not answering",
    "dead": "not running",
    "waiting": "not started",
}


def note_adoption(store: JobStore, backend: Backend, probe: ReadinessProbe, job: StoredJob, doing: str) -> None:
    """Look at every process of the job and note what is found. `doing`: what goes on from here."""
    store.events.note(job.name, _event(doing, look_at_units(job, backend, probe)))


def _event(doing: str, units: Sequence[UnitView]) -> Event:
    named: dict[UnitState, list[str]] = {}
    for unit in units:
        named.setdefault(unit.state, []).append(unit.name)
    found = [f"{WORDS[state]}: {', '.join(names)}" for state, names in named.items()]
    return Event(
        kind="job_adopted",
        text=f"{doing} under pid {os.getpid()}; {'; '.join(found)}",
        data={"pid": os.getpid(), "processes": {unit.name: unit.state for unit in units}},
    )
