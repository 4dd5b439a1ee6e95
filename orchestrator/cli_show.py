"""How the CLI shows things: a start in progress, a job, a plan, findings."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from pydantic import BaseModel
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.unit import HttpProbe, ListenProbe, MetricProbe, Probe
from orchestrator.api.audit_schemas import AuditStatus
from orchestrator.api.schemas import JobStatus
from orchestrator.observe.diagnoses import Diagnosis
from orchestrator.plan.types import JobPlan
from orchestrator.supervisor.interfaces import Progress, UnitProgress

COLOURS = {
    "waiting": "dim",
    "starting": "yellow",
    "ready": "green",
    "dead": "red",
    "failed": "red",
    "degraded": "yellow",
    "abandoned": "red",
}
PLAIN_EVERY_S = 10.0


class StartDisplay:
    """Shows a start: a live table on a terminal, a line per change (and one every 10 s) anywhere else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._shown: dict[str, str] = {}
        self._doing = ""
        self._last = 0.0

    def __enter__(self) -> StartDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(Group(_units_table(progress.units), Text(progress.now_doing, style="dim")))
        else:
            self._plain(progress)

    def _plain(self, progress: Progress) -> None:
        for unit in progress.units:
            if unit.state != self._shown.get(unit.name, "waiting"):
                self._shown[unit.name] = unit.state
                _say(self._console, f"{unit.name}: {unit.state} ({unit.seconds:.0f} s)")
        waiting = progress.now_doing.startswith("waiting")
        due = time.monotonic() - self._last > PLAIN_EVERY_S
        if progress.now_doing and progress.now_doing != self._doing and (not waiting or due):
            _say(self._console, progress.now_doing)
            self._doing = progress.now_doing
            self._last = time.monotonic()


def _units_table(units: Sequence[UnitProgress]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "time", ""):
        table.add_column(column, no_wrap=column != "")
    for unit in units:
        seconds = f"{unit.seconds:.0f} s" if unit.state != "waiting" else ""
        table.add_row(unit.name, Text(unit.state, style=COLOURS[unit.state]), seconds, Text(unit.detail, style="dim"))
    return table


def show_job(console: Console, job: JobStatus) -> None:
    """One job: phase, processes, what is wrong with them, addresses. Readable at 80 columns; long paths stand alone."""
    style = COLOURS.get(job.phase, "bold")
    _say(console, Text.assemble((job.name, "bold"), "  ", (job.phase, style), f"  recorded {_age(job.age_s)} ago"))
    if job.reason:
        _say(console, Text(job.reason, style=style))
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "pid", "ready after"):
        table.add_column(column, no_wrap=True)
    for unit in job.units:
        ready = f"{unit.seconds:.0f} s" if unit.state == "ready" else ""
        table.add_row(unit.name, Text(unit.state, style=COLOURS[unit.state]), str(unit.pid or ""), ready)
    console.print(table)
    running = job.phase not in ("failed", "stopped")
    for unit in job.units if running else []:
        if unit.state == "starting" and unit.detail:
            _say(console, f"{unit.name}: {unit.detail}")
    for unit in job.units if job.phase != "stopped" else []:
        if unit.state == "dead" and unit.log:
            _say(console, f"{unit.name}: log {unit.log}")
    if job.phase in ("ready", "degraded"):
        _say(console, f"router      {job.router.url}   (model {job.model!r})")
        if job.weights is not None:
            _say(console, f"weights     {job.weights.version}, epoch {job.weights.epoch}")
        if job.prometheus_url:
            _say(console, f"prometheus  {job.prometheus_url}")
    _say(console, f"files       {job.directory}")


def show_plan(console: Console, plan: JobPlan) -> None:
    """The whole plan and every generated file. Plain text, so that it can be compared."""
    for choice in plan.choices:
        _say(console, f"chosen: {choice.subject}: {choice.value} ({choice.reason})")
    for finding in plan.findings:
        _say(console, f"{finding.severity}: {finding.field}: {finding.problem}; {finding.mend}")
    for unit in plan.units:
        _say(
            console, f"\n# {unit.name} on {unit.node}, stage {unit.start_stage}, ready when {_probe_words(unit.probe)}"
        )
        for port in unit.ports:
            _say(console, f"# port {port.port}: {port.name}")
        for ports in unit.port_ranges:
            _say(console, f"# ports {ports.first} to {ports.first + ports.count - 1}: {ports.name}")
        if unit.cwd is not None:
            _say(console, f"# in {unit.cwd}")
        if unit.unset_env:
            _say(console, f"# without {', '.join(unit.unset_env)} of the launching environment")
        for name in sorted(unit.env):
            _say(console, f"{name}={shlex.quote(unit.env[name])} \\")
        _say(console, shlex.join(unit.argv))
    for file in plan.files:
        _say(console, f"\n## {file.path}")
        _say(console, file.text.rstrip("\n"))


def _probe_words(probe: Probe) -> str:
    match probe:
        case ListenProbe():
            return f"it listens on port {probe.port}"
        case HttpProbe():
            return f"{probe.url} answers 200"
        case MetricProbe():
            return f"{probe.metric} at {probe.url} is {probe.at_least:.0f} or more"


def show_diagnosis(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    marks = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}
    for one in diagnoses:
        word, style = marks[one.verdict]
        _say(console, Text.assemble((f"{word:<5}", style), f"{one.subject}: {one.found}"))
        if one.mend and one.verdict != "ok":
            _say(console, Text(f"      mend: {one.mend}", style="dim"))


def show_audit(console: Console, found: AuditStatus) -> None:
    for each in found.audited:
        _say(console, each.text)
        for key in each.keys:
            _say(console, f"  key {key}")
        if each.keys_unknown:
            _say(console, f"  its keys are not known: {each.keys_unknown}")
    _say(console, found.outcome if found.audited else "no request was kept, and there is no pool to probe")


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_model(model: BaseModel) -> None:
    print_json(model.model_dump(mode="json"))


def _say(console: Console, line: str | Text) -> None:
    """One line as it is, however long: no markup, no wrapping at the window's edge."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
