"""Restarts and drains of single processes, and the number of a role's replicas, as the CLI and the control API ask for
them: ask, look, wait.

A request is noted in the state folder and nothing else; `replica_keeper.py` carries it out, for whoever supervises the
job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from connectors.types import Role
from orchestrator.errors import RequestRefused, RequestUnknown
from orchestrator.outcomes import ended_within, seen_through
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.kinds import kinds_of
from orchestrator.plan.scale import replicas_of, scaled_plan
from orchestrator.plan.types import JobPlan
from orchestrator.replica_requests import refusal, troubles
from orchestrator.spec.job import JobSpec
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import KeepingStore, ReplicaRequest, RequestKind, drained
from orchestrator.store.records import SERVING, StoredJob
from orchestrator.supervision import Supervision
from orchestrator.supervisor.view import JobView
from orchestrator.weights.words import BY_REQUEST
from router.core.fleet import ReplicaView

FORCE_IT = "force it, if nobody needs the job meanwhile"


@dataclass(frozen=True, kw_only=True)
class ReplicaService:
    """Of all jobs. Every method raises `JobUnknown` where none is recorded under the name."""

    store: JobStore
    keeping: KeepingStore
    supervision: Supervision
    replicas: Callable[[JobPlan], Mapping[str, ReplicaView] | None]
    """As the router of a job has them."""
    facts: Callable[[JobSpec, Path, frozenset[int]], ClusterFacts]
    """Of a job's spec, its folder and the ports of other jobs."""

    def restart(self, name: str, process: str, *, force: bool) -> ReplicaRequest:
        """Ask for another life of a process. Requests of an engine run out first, and other replicas take its sessions.

        Raises:
            RequestUnknown: the job has no such process.
            RequestRefused: not now; with `force`, only where another request about it has not ended.
        """
        return self._ask(name, "restart", process, force=force)

    def drain(self, name: str, replica: str, *, force: bool) -> ReplicaRequest:
        """Ask that a replica gets no requests, and no new weights, until it is undrained. Raises as `restart` does."""
        return self._ask(name, "drain", replica, force=force)

    def undrain(self, name: str, replica: str) -> ReplicaRequest:
        """Ask that a drained replica serves again, once it has what the job serves. Raises as `restart` does."""
        return self._ask(name, "undrain", replica, force=False)

    def scale(self, name: str, role: Role, replicas: int, *, force: bool) -> ReplicaRequest:
        """Ask that a role has so many replicas. New ones are loaded to what the job serves before they get requests;
        of those that are too many, the last are drained and ended, and others take their sessions.

        Raises:
            RequestUnknown: the job has no such role.
            RequestRefused: not now, or it has so many.
            SpecError, PlanRefused: more of them cannot run here.
        """
        job = self._serving(name)
        names = replicas_of(job.plan, role)
        if not names:
            has = ", ".join(dict.fromkeys(job.plan.fleet.values()))
            raise RequestUnknown(f"job {name!r} has no role {role!r}; it has: {has}")
        if replicas == len(names):
            raise RequestRefused(f"job {name!r} has {replicas} of role {role} already")
        plan = scaled_plan(job.plan, role, replicas, self._facts(job))
        leaving = names[replicas:]
        if leaving and not force:
            self._refuse_leaving(job, leaving)
        number = self.keeping.ask_scale(job, role, replicas, plan, is_forced=force, now=time.time())
        return self.keeping.request(name, number)

    def request(self, name: str, number: int) -> ReplicaRequest:
        """Raises `RequestUnknown`."""
        self.store.get(name)
        return self.keeping.request(name, number)

    def requests(self, name: str, limit: int) -> list[ReplicaRequest]:
        """The newest of the job's present run, in their order."""
        self.store.get(name)
        return self.keeping.requests(name)[-limit:]

    def wait(self, name: str, number: int, timeout_s: float) -> ReplicaRequest:
        """The request once it has ended, or as it is after so long."""
        return ended_within(timeout_s, partial(self.request, name, number))

    def see_through(self, name: str, number: int) -> ReplicaRequest:
        """The request once it has ended, as `seen_through` says it."""
        return seen_through(self.supervision, name, partial(self.request, name, number))

    def troubles(self, view: JobView) -> list[str]:
        """What a user should know of the processes of a job that serves, beside which of them are ready."""
        name, plan = view.job.name, view.job.plan
        states = {unit.name: unit.state for unit in view.units}
        return troubles(states, kinds_of(plan), self.keeping.ends(name), self.keeping.requests(name))

    def _ask(self, name: str, kind: RequestKind, process: str, *, force: bool) -> ReplicaRequest:
        job = self._serving(name)
        self._check(job, kind, process, force=force)
        record = next((record for record in job.records if record.name == process), None)
        if record is None:
            raise RequestRefused(f"{process} was never started; scale its role back, and up again")
        number = self.keeping.ask(name, job.run_id, kind, record, why=BY_REQUEST, is_forced=force, now=time.time())
        return self.keeping.request(name, number)

    def _serving(self, name: str) -> StoredJob:
        job = self.store.get(name)
        if job.phase not in SERVING:
            raise RequestRefused(f"job {name!r} is {job.phase}: a job that serves can be asked for that")
        return job

    def _facts(self, job: StoredJob) -> ClusterFacts:
        return self.facts(job.plan.spec, job.directory, self.store.reserved_ports(except_job=job.name))

    def _refuse_leaving(self, job: StoredJob, leaving: Sequence[str]) -> None:
        """Raises `RequestRefused` where nobody could serve without them."""
        fleet = job.plan.fleet
        gone = drained(self.keeping.requests(job.name)).union(leaving)
        replicas = self.replicas(job.plan)
        for name in leaving:
            if why := refusal(name, "engine", fleet, replicas, gone):
                raise RequestRefused(f"{why}; {FORCE_IT}")

    def _check(self, job: StoredJob, kind: RequestKind, process: str, *, force: bool) -> None:
        """What can be known before anything begins; who carries it out looks again."""
        kinds = kinds_of(job.plan)
        fleet = job.plan.fleet
        known = kinds if kind == "restart" else fleet
        if process not in known:
            what = "process" if kind == "restart" else "replica"
            raise RequestUnknown(f"job {job.name!r} has no {what} {process!r}; it has: {', '.join(known)}")
        requests = self.keeping.requests(job.name)
        gone = drained(requests)
        if kind == "undrain" and process not in gone:
            raise RequestRefused(f"{process} is not drained")
        if kind == "undrain" or force:
            return
        leaving = gone | {each.unit for each in requests if each.outcome is None and each.kind != "undrain"}
        why = refusal(process, kinds[process], fleet, self.replicas(job.plan), leaving)
        if why:
            raise RequestRefused(f"{why}; {FORCE_IT}")
