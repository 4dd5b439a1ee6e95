"""How a job and a start look at 80 columns."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from orchestrator.api.schemas import EngineStatus, JobStatus, RouterStatus, UnitStatus, WeightsServed
from orchestrator.cli_show import StartDisplay, show_diagnosis, show_job
from orchestrator.observe.diagnoses import Diagnosis
from orchestrator.store.records import Phase
from orchestrator.supervisor.interfaces import Progress, UnitProgress
from orchestrator.supervisor.state import UnitState

LONG = "/home/someone/with/a/long/path/to/a/state/folder/of/theirs/jobs/swe-rollouts/logs/20261129T170834Z-deadbeef"


def console() -> Console:
    return Console(file=StringIO(), width=80, force_terminal=False)


def text(shown: Console) -> list[str]:
    assert isinstance(shown.file, StringIO)
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]


def unit(name: str, state: UnitState, detail: str = "") -> UnitStatus:
    log = f"{LONG}/{name}.log" if state != "waiting" else ""
    return UnitStatus(name=name, node="n0", state=state, pid=4711, seconds=12.3, detail=detail, log=log)


def job(phase: Phase, *units: UnitStatus, reason: str = "") -> JobStatus:
    return JobStatus(
        name="swe-rollouts",
        phase=phase,
        reason=reason,
        operation="swe-rollouts:1f3c9a2b:start",
        age_s=185,
        directory=LONG,
        spec_hash="",
        model="small",
        units=list(units),
        engines=[EngineStatus(name="prefill-0", role="prefill", url="http://127.0.0.1:1", state="ready")],
        router=RouterStatus(url="http://127.0.0.1:8000"),
        weights=WeightsServed(version="step-7", epoch=8),
        pool=None,
        prometheus_url="http://127.0.0.1:9090",
        warnings=[],
        events=[],
    )


def test_a_ready_job() -> None:
    out = console()
    show_job(out, job("ready", unit("mooncake-master", "ready"), unit("prefill-0", "ready")))
    assert text(out) == [
        "swe-rollouts  ready  recorded 3 min ago",
        "process          state  pid   ready after",
        "mooncake-master  ready  4711  12 s",
        "prefill-0        ready  4711  12 s",
        "router      http://127.0.0.1:8000   (model 'small')",
        "weights     step-7, epoch 8",
        "prometheus  http://127.0.0.1:9090",
        f"files       {LONG}",
    ]


def test_paths_and_probes_stand_below_the_table_each_on_its_own_line() -> None:
    out = console()
    detail = "GET /health: connection refused, and a good many words more that would not fit beside it in a table"
    reason = "not running: prefill-0; and a reason that is longer than any window is wide, as reasons tend to be [x]"
    show_job(out, job("degraded", unit("prefill-0", "dead"), unit("decode-0", "starting", detail), reason=reason))
    lines = text(out)
    assert reason in lines
    assert f"prefill-0: log {LONG}/prefill-0.log" in lines
    assert f"decode-0: {detail}" in lines
    table = lines[lines.index("process    state     pid   ready after") :][:3]
    assert [line.split()[:2] for line in table[1:]] == [["prefill-0", "dead"], ["decode-0", "starting"]]


def test_a_stopped_job_does_not_list_its_dead() -> None:
    out = console()
    show_job(out, job("stopped", unit("prefill-0", "dead")))
    assert not [line for line in text(out) if "log " in line or line.startswith("router")]


def progress(state: UnitState, doing: str) -> Progress:
    return Progress(units=(UnitProgress(name="prefill-0", state=state, seconds=3, detail="[d]"),), now_doing=doing)


def test_a_start_without_a_terminal_is_a_line_per_change() -> None:
    out = console()
    with StartDisplay(out) as display:
        for _ in range(3):
            display(progress("waiting", ""))
        for _ in range(3):
            display(progress("starting", "waiting for prefill-0 ([d])"))
        display(progress("ready", "opening the router's gate"))
    assert text(out) == [
        "prefill-0: starting (3 s)",
        "waiting for prefill-0 ([d])",
        "prefill-0: ready (3 s)",
        "opening the router's gate",
    ]


def test_a_diagnosis_shows_its_mend_where_there_is_something_to_mend() -> None:
    out = console()
    fine = Diagnosis(subject="system", verdict="ok", found="Linux", mend="never shown")
    bad = Diagnosis(subject="liburing.so.2", verdict="fail", found="cannot be loaded", mend="apt-get install liburing2")
    show_diagnosis(out, [fine, bad])
    assert text(out) == [
        "ok   system: Linux",
        "FAIL liburing.so.2: cannot be loaded",
        "      mend: apt-get install liburing2",
    ]
