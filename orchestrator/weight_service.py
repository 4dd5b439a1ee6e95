"""New weights for running jobs, as the CLI and the control API ask for them: push, look, wait.

A push is noted in the state folder and nothing else; whoever supervises the job begins it (`supervision.py`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.errors import UpdateRefused, UpdateUnknown
from orchestrator.plan.types import JobPlan
from orchestrator.spec.weights import InFlightMode, Strategy, Transport
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import drained
from orchestrator.store.records import SERVING
from orchestrator.store.updates import StoredRemark, UpdateStore
from orchestrator.supervision import Supervision
from orchestrator.weights.groups import update_refusal
from orchestrator.weights.journal import Push, PushRecord, ask_for, newest_push, position_of, push_of, pushes_of
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.words import Position

LOOK_EVERY_S = 0.3
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
        plan = self.updatable(name)
        weights = plan.weights
        named = {**source, "version": version or source.get("version")}
        push = Push(
            version=str(named["version"]),
            source=named,
            strategy=options.strategy or weights.strategy,
            in_flight=options.in_flight or weights.in_flight,
            load_mode=options.load_mode or weights.load_mode,
        )
        self._check(push, source, plan)
        return self.record(name, ask_for(self.updates, name, push))

    def updatable(self, name: str) -> JobPlan:
        """The plan of a job that may be pushed to. Raises `UpdateRefused` for any other."""
        job = self.store.get(name)
        if job.phase not in SERVING:
            raise UpdateRefused(f"job {name!r} is {job.phase}: weights are pushed to a job that serves")
        if not job.plan.weights.in_place:
            raise UpdateRefused(f"engines of job {name!r} keep their weights: start it with a [weights] section")
        return job.plan

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
        fleet = {engine.name: engine.role for engine in plan.engines}
        gone = drained(self.supervision.keeping.requests(plan.job))
        if refusal := update_refusal(fleet, gone, push.strategy, wipes_pool=plan.wipes_pool):
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

    def history(self, name: str) -> list[PushRecord]:
        self.store.get(name)
        return pushes_of(self.updates, name)

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
        deadline = time.monotonic() + timeout_s
        while True:
            record = self.record(name, number)
            if record.outcome is not None or time.monotonic() > deadline:
                return record
            time.sleep(LOOK_EVERY_S)

    def see_through(self, name: str, number: int) -> PushRecord:
        """The push once it has ended. Where nobody supervises the job, this call does so meanwhile."""

        def is_over(position: Position) -> bool:
            return position.course is None and self.record(name, number).outcome is not None

        while (record := self.record(name, number)).outcome is None:
            if not self.supervision.keep(name, is_over):
                record = self.wait(name, number, LOOK_EVERY_S)
            elif self.store.get(name).phase not in SERVING:
                break
        return record
