"""A machine that runs no process, and everything that a `JobService` or a `Starter` needs around it.

The machine outlives the backends that look at it, as the kernel outlives `headrace`. Knobs and records are attributes.
"""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from connectors.engine_client import CacheConfig
from connectors.pool_client import PoolUse
from deploy.errors import FileNotWritten
from deploy.probe import ProbeResult
from deploy.unit import LaunchUnit, PlannedFile, Probe, RunContext, UnitRecord, UnitStatus
from orchestrator.errors import JobFailed
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import EnginePlan, JobPlan, RouterPlan
from orchestrator.replica_service import ReplicaService
from orchestrator.service import JobService
from orchestrator.spec.job import JobSpec
from orchestrator.store.database import Database
from orchestrator.store.home import StateUnusable
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import KeepingStore
from orchestrator.store.records import StoredJob
from orchestrator.store.updates import UpdateStore
from orchestrator.supervision import Supervision
from orchestrator.supervisor.interfaces import Progress
from orchestrator.supervisor.start import Starter
from orchestrator.supervisor.startup_checks import OffloadProbe
from orchestrator.weight_service import WeightService
from tests.fakes.fake_receivers import FakeReceivers, pairs_of_engines
from tests.unit.orchestrator.samples import facts_of, pd_data, plan_of, spec_of

NOW = 1_000_000.0


@dataclass
class FakeMachine:
    """What runs on it, and what was done to it."""

    living: dict[int, tuple[str, str]] = field(default_factory=dict)
    """pid -> (run id, unit name); a stray's name is that of no recorded unit."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    stopped: list[tuple[str, ...]] = field(default_factory=list)
    """The units of each stop, in order."""
    prepared: list[str] = field(default_factory=list)
    sweeps: int = 0
    log_text: str = "first line\nlast line\n"
    """What every started unit writes."""
    undying: set[str] = field(default_factory=set)
    """Units whose processes cannot be ended."""
    on_start: Callable[[str], None] = lambda _name: None
    """Called with a unit's name just after it was started, before anyone can record it."""
    prepare_fails: Exception | None = None
    prepare_fails_for: set[str] = field(default_factory=set)
    """Units that cannot be started."""
    pids: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    def names(self) -> list[str]:
        return [name for _, name in self.living.values()]

    def run(self, run_id: str, name: str) -> int:
        pid = next(self.pids)
        self.living[pid] = (run_id, name)
        return pid

    def kill(self, name: str, exit_code: int = -9) -> None:
        for pid in [pid for pid, (_, unit) in self.living.items() if unit == name]:
            del self.living[pid]
            self.exit_codes[pid] = exit_code

    def end(self, pids: Sequence[int]) -> tuple[int, ...]:
        """Returns those that would not end."""
        left = tuple(pid for pid in pids if self.living[pid][1] in self.undying)
        for pid in set(pids) - set(left):
            del self.living[pid]
        return left


class FakeBackend:
    """Implements `deploy.backend.Backend` on a `FakeMachine`."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine

    def prepare(self, run: RunContext, units: Sequence[LaunchUnit], files: Sequence[PlannedFile]) -> None:
        if self.machine.prepare_fails is not None:
            raise self.machine.prepare_fails
        if misfits := self.machine.prepare_fails_for.intersection(unit.name for unit in units):
            raise FileNotWritten(path=Path(misfits.pop()), cause="No space left on device")
        self.machine.prepared.append(run.run_id)

    def start(self, run: RunContext, unit: LaunchUnit) -> UnitRecord:
        run.log_dir.mkdir(parents=True, exist_ok=True)
        log = run.log_dir / f"{unit.name}.log"
        log.write_text(self.machine.log_text)
        pid = self.machine.run(run.run_id, unit.name)
        self.machine.started.append(unit.name)
        self.machine.on_start(unit.name)
        return UnitRecord(name=unit.name, node=unit.node, pid=pid, start_ticks=pid, boot_id="boot", log=log)

    def poll(self, run: RunContext, records: Sequence[UnitRecord]) -> dict[str, UnitStatus]:
        return {record.name: self._status(record) for record in records}

    def alive(self, records: Sequence[UnitRecord]) -> frozenset[UnitRecord]:
        return frozenset(record for record in records if record.pid in self.machine.living)

    def _status(self, record: UnitRecord) -> UnitStatus:
        alive = record.pid in self.machine.living
        return UnitStatus(
            name=record.name,
            alive=alive,
            members=(record.pid,) if alive else (),
            exit_code=self.machine.exit_codes.get(record.pid),
        )

    def stop(self, run: RunContext, records: Sequence[UnitRecord], grace_s: float) -> tuple[int, ...]:
        self.machine.stopped.append(tuple(record.name for record in records))
        return self.machine.end([record.pid for record in records if record.pid in self.machine.living])

    def sweep(self, run: RunContext, records: Sequence[UnitRecord], grace_s: float) -> tuple[int, ...]:
        self.machine.sweeps += 1
        known = {record.pid for record in records}
        living = self.machine.living.items()
        return self.machine.end([pid for pid, (run_id, _) in living if run_id == run.run_id and pid not in known])


@dataclass
class FakeProbe:
    """A unit is ready unless it is named here."""

    machine: FakeMachine
    never_ready: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def __call__(self, probe: Probe, members: Sequence[int]) -> ProbeResult:
        living = self.machine.living.get(members[0])
        if living is None:
            return ProbeResult(ready=False, detail="gone since it was seen")
        name = living[1]
        self.asked.append(name)
        ready = name not in self.never_ready
        return ProbeResult(ready=ready, detail="answers" if ready else "GET /health: connection refused")


@dataclass
class FakeQuestions:
    configs: dict[str, CacheConfig | None] = field(default_factory=dict)
    """Where an engine does not say block size 32 and "auto"; None: it does not report."""
    hits: float = 32
    problem: str = ""
    probed: list[str] = field(default_factory=list)
    during_probe: Callable[[], None] = lambda: None

    def cache_configs(self, engines: Sequence[EnginePlan]) -> Mapping[str, CacheConfig]:
        usual = CacheConfig(block_size=32, cache_dtype="auto")
        answers = {engine.name: self.configs.get(engine.name, usual) for engine in engines}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def probe_offload(self, engine: EnginePlan, model: str, salt: str) -> OffloadProbe:
        self.probed.append(engine.name)
        self.during_probe()
        return OffloadProbe(engine=engine.name, prompt_tokens=66, external_hit_tokens=self.hits, problem=self.problem)


@dataclass
class FakeOpening:
    """In place of all that makes engines routable."""

    opened: list[str] = field(default_factory=list)
    failure: str = ""

    def __call__(self, job: StoredJob) -> None:
        if self.failure:
            raise JobFailed(self.failure)
        self.opened.append(job.plan.router.url)


class UnsyncedDatabase(Database):
    """Does not wait for the disk: a test that loses power is run again."""

    synchronous = "OFF"
    is_full = False
    """Its disk: then it can be read, and not written."""

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        self._refuse_full()
        with super().transaction() as connection:
            yield connection

    @contextmanager
    def noting(self) -> Iterator[sqlite3.Connection]:
        self._refuse_full()
        with super().noting() as connection:
            yield connection

    def _refuse_full(self) -> None:
        if self.is_full:
            raise StateUnusable(self.home, "database or disk is full", "make room on its disk")


class FakeFleet:
    """A store in a folder, a fake machine, and what stands on them."""

    def __init__(self, home: Path, pairs: int = 1) -> None:
        self.home = home
        self._pairs = pairs
        self.database = UnsyncedDatabase(home)
        self.store, self.updates = JobStore(self.database), UpdateStore(self.database)
        self.keeping = KeepingStore(self.database)
        self.machine = FakeMachine()
        self.probe = FakeProbe(self.machine)
        self.questions = FakeQuestions()
        self.opening = FakeOpening()
        self.pool_use: PoolUse | str = PoolUse(mounted_bytes=256 << 20, used_bytes=1 << 20, keys=3)
        self.receivers = FakeReceivers(pairs_of_engines(pairs))
        self.shown: list[Progress] = []
        self.open_requests = threading.Event()
        """Clear: none is left."""
        self.drains = 0
        self.facts: Callable[[JobSpec, Path, frozenset[int]], ClusterFacts] = self._facts

    def backend(self) -> FakeBackend:
        return FakeBackend(self.machine)

    def starter(self) -> Starter:
        return Starter(
            store=self.store,
            backend=self.backend(),
            probe=self.probe,
            questions=self.questions,
            open_job=self.opening,
            look_every_s=0.001,
        )

    def service(self) -> JobService:
        return JobService(
            store=self.store,
            backends=("local",),
            backend=self.backend,
            facts=self.facts,
            probe=self.probe,
            questions=self.questions,
            pool_use=lambda _pool: self.pool_use,
            router_traffic=lambda _router: self.receivers.traffic(),
            open_job=self.opening,
            let_requests_end=self.let_requests_end,
            weights=self.weights(),
            replicas=self.replicas(),
            driver_wait_s=0.05,
        )

    def let_requests_end(self, _router: RouterPlan, is_wanted: Callable[[], bool]) -> None:
        self.drains += 1
        while self.open_requests.is_set() and is_wanted():
            time.sleep(0.005)

    def weights(self) -> WeightService:
        return WeightService(store=self.store, updates=self.updates, supervision=self.supervision())

    def replicas(self) -> ReplicaService:
        return ReplicaService(
            store=self.store,
            keeping=self.keeping,
            supervision=self.supervision(),
            replicas=lambda _plan: self.receivers.outside().replicas,
            facts=self.facts,
        )

    def supervision(self) -> Supervision:
        return Supervision(
            store=self.store,
            updates=self.updates,
            backend=self.backend,
            probe=self.probe,
            carry_out=lambda _plan: self.receivers.carry_out,
            not_ready=lambda _router: self.receivers.not_ready(),
            keeping=self.keeping,
            look_outside=lambda _plan: self.receivers.outside(),
            let_handoffs_end=self.receivers.let_handoffs_end,
            look_every_s=0.005,
        )

    def spec(self, **changes: object) -> JobSpec:
        return spec_of(pd_data(**changes))

    def plan(self, **changes: object) -> JobPlan:
        data = pd_data(**changes)
        for role in data["roles"].values():
            role.setdefault("replicas", self._pairs)
        spec = spec_of(data)
        reserved = self.store.reserved_ports(except_job=spec.name)
        return plan_of(data, self._facts(spec, self.store.folder("demo"), reserved))

    def record(self, plan: JobPlan | None = None, run_id: str = "run-1", now: float = NOW) -> StoredJob:
        """A job that is about to start."""
        plan = plan or self.plan()
        self.store.create(plan, run_id=run_id, directory=self.store.folder(plan.job), now=now)
        return self.store.get(plan.job)

    def bring_up(self, name: str = "demo") -> StoredJob:
        return self.starter().bring_up(name, self.shown.append)

    def running(self) -> StoredJob:
        """A job that came up."""
        self.record()
        return self.bring_up()

    def _facts(self, spec: JobSpec, job_dir: Path, reserved: frozenset[int]) -> ClusterFacts:
        given = facts_of(job_dir=str(job_dir), reserved_ports=reserved)
        return replace(given, socket_dir=self.home / f"sockets-{job_dir.name}")


def stages(plan: JobPlan) -> list[tuple[str, ...]]:
    """Names of the units of each stage, lowest first."""
    numbers = sorted({unit.start_stage for unit in plan.units})
    return [tuple(unit.name for unit in plan.units if unit.start_stage == number) for number in numbers]
