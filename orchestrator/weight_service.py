"""New weights for running jobs, as the CLI and the control API ask for them: push, look, wait.

A push is noted in the state folder and nothing else; whoever supervises the job begins it (`supervision.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.errors import UpdateRefused, UpdateUnknown
from orchestrator.outcomes import ended_within, seen_through
from orchestrator.plan.types import JobPlan
from orchestrator.spec.weights import InFlightMode, Strategy, Transport
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import drained
from orchestrator.store.records import SERVING, StoredJob
from orchestrator.store.updates import StoredRemark, UpdateStore
from orchestrator.supervision import Supervision
from orchestrator.weights.groups import update_refusal
from orchestrator.weights.journal import Push, PushRecord, ask_for, newest_push, position_of, push_of, pushes_of
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.words import Position

_VERSION = re.compile(r"[!-~]{1,128}")
"""A version stands in a header of each reply."""


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """None: as the job file has it."""

    strategy: Strategy | None = None
    in_flight: InFlightMode | None = None
    load_mode: LoadMode | None = None


@dataclass(frozen=True, kw_only=True)
class WeightService:
    """Of all jobs. Every method raises `JobUnknown` where none is recorded under the name."""

    store: JobStore
    updates: UpdateStore
    supervision: Supervision

    def push(self, name: str, version: str | None, source: Mapping[str, Any], options: PushOptions) -> PushRecord:
        """Ask for an update. `version` None: the source's own name for it.

        Raises:
            UpdateRefused: this update cannot be, or not now.
        """
        job = self.updatable(name)
        weights = job.plan.weights
        named = {**source, "version": version or source.get("version")}
        push = Push(
            version=str(named["version"]),
            source=named,
            strategy=options.strategy or weights.strategy,
            in_flight=options.in_flight or weights.in_flight,
            load_mode=options.load_mode or weights.load_mode,
        )
        self._check(push, source, job.plan)
        return self.record(name, ask_for(self.updates, name, job.run_id, push))

    def updatable(self, name: str) -> StoredJob:
        """A job that may be pushed to. Raises `UpdateRefused` for any other."""
        job = self.store.get(name)
        if job.phase not in SERVING:
            raise UpdateRefused(f"job {name!r} is {job.phase}: weights are pushed to a job that serves")
        if not job.plan.weights.in_place:
            raise UpdateRefused(f"engines of job {name!r} keep their weights: start it with a [weights] section")
        return job

    def _check(self, push: Push, source: Mapping[str, Any], plan: JobPlan) -> None:
        """What can be known before anything begins; the coordinator looks again."""
        if push.source["version"] is None:
            raise UpdateRefused("version is missing, and the source has none: name these weights (--version)")
        if not _VERSION.fullmatch(push.version):
            raise UpdateRefused(f"version is {push.version!r}: 1 to 128 printable ASCII characters without blanks")
        if source.get("version", push.version) != push.version:
            raise UpdateRefused(f"source.version is {source['version']!r}, version is {push.version!r}: name it once")
        if source.get("transport") not in get_args(Transport):
            raise UpdateRefused('source.transport must be "path", "store" or "nixl", as the publisher gives it')
        if source["transport"] == "path" and not str(source.get("path", "")).startswith("/"):
            raise UpdateRefused(f"source.path is {source.get('path')!r}: give the checkpoint's folder as absolute path")
        position = position_of(self.updates, plan.job)
        served = FIRST_VERSION if position is None else position.committed.version
        if push.version in (served, FIRST_VERSION):
            raise UpdateRefused(f"version {push.version!r} names other weights already: name new weights anew")
        if push.in_flight == "readmit" and plan.weights.in_flight != "readmit":
            mend = 'push with another, or start the job with weights.in_flight = "readmit"'
            problem = f"the job was started with {plan.weights.in_flight!r}, so its router keeps no tokens of streams"
            raise UpdateRefused(f'in_flight is "readmit": {problem}; {mend}')
        gone = drained(self.supervision.keeping.requests(plan.job))
        if refusal := update_refusal(plan.fleet, gone, push.strategy, wipes_pool=plan.wipes_pool):
            raise UpdateRefused(refusal)

    def cancel(self, name: str, number: int) -> PushRecord:
        """Ask that an update ends: called off where no engine has begun to load, else the whole fleet goes back. Once
        its version is committed, or it has ended, nothing changes. Raises `UpdateUnknown`."""
        self.record(name, number)
        self.updates.cancel(name, number)
        return self.record(name, number)

    def record(self, name: str, number: int) -> PushRecord:
        """Raises `UpdateUnknown`."""
        self.store.get(name)
        found = push_of(self.updates, name, number)
        if found is None:
            raise UpdateUnknown(f"job {name!r} has no update {number}")
        return found

    def newest(self, name: str) -> PushRecord | None:
        """None where the job has had none."""
        self.store.get(name)
        return newest_push(self.updates, name)

    def history(self, name: str, limit: int) -> list[PushRecord]:
        """The newest of the job's present run, in their order."""
        self.store.get(name)
        return pushes_of(self.updates, name, limit)

    def remarks(self, name: str) -> list[StoredRemark]:
        """What a person should know: engines that joined or were given up, steps that must succeed and do not."""
        self.store.get(name)
        return self.updates.remarks(name)

    def position(self, name: str) -> Position | None:
        """Where its coordinator is; None where the job has never come up."""
        self.store.get(name)
        return position_of(self.updates, name)

    def wait(self, name: str, number: int, timeout_s: float) -> PushRecord:
        """The push once it has ended, or as it is after so long."""
        return ended_within(timeout_s, partial(self.record, name, number))

    def see_through(self, name: str, number: int) -> PushRecord:
        """The push once it has ended, as `seen_through` says it."""
        return seen_through(self.supervision, name, partial(self.record, name, number))
