"""`headrace`: argument parsing, one call of the service, output.

Exit codes: 0 done, 1 failed, 2 wrong use, 3 an audit that could not be made, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from deploy.logs import follow, tail
from orchestrator import cli_events, cli_replicas, cli_serve, cli_weights
from orchestrator.api.audit_schemas import AuditBody, audit_status
from orchestrator.api.schemas import job_status
from orchestrator.cli_show import StartDisplay, print_json, show_audit, show_diagnosis, show_job, show_plan
from orchestrator.compose import local_service
from orchestrator.errors import AuditFailed, HeadraceError
from orchestrator.observe.doctor import diagnose
from orchestrator.plan.build import refuse_errors
from orchestrator.plan.shown import shown_plan
from orchestrator.plan.types import plan_to_json
from orchestrator.service import JobService
from orchestrator.spec.load import load_job_file
from orchestrator.store.home import home_folder

NOT_AUDITED = 3
INTERRUPTED = 130
"""What typer makes of Ctrl-C."""

app = typer.Typer(
    help="Runs disaggregated prefill/decode vLLM fleets for RL rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_weights.app, name="weights")
app.command()(cli_events.events)
cli_replicas.add_commands(app)
out = Console()
err = Console(stderr=True)

JobFile = Annotated[Path, typer.Argument(help="Job file, .toml or .json.")]
JobName = Annotated[str, typer.Argument(help="Name of the job.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="field=value, stronger than the job file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point: errors meant for a user become one message on stderr and exit code 1."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        app()
    except HeadraceError as error:
        _fail(str(error))
    except SystemExit as end:
        if end.code == INTERRUPTED:
            err.print("interrupted; `headrace status` says whether anything is left", highlight=False)
        raise


@app.command()
def render(job: JobFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show the whole plan and every generated file. Starts nothing."""
    plan = shown_plan(_service().plan(load_job_file(job, overrides or [])))
    if as_json:
        sys.stdout.write(plan_to_json(plan))
    else:
        show_plan(out, plan)
    # Once more: what is shown is thousands of lines long.
    refuse_errors(plan)


@app.command()
def up(job: JobFile, overrides: Overrides = None) -> None:
    """Start a job and wait until it serves. On failure or Ctrl-C, everything that was started is ended."""
    service = _service()
    admitted = service.admit(load_job_file(job, overrides or []))
    for finding in admitted.job.plan.findings:
        err.print(Text(f"warning: {finding.field}: {finding.problem}; {finding.mend}", style="yellow"), soft_wrap=True)
    with StartDisplay(err) as display:
        service.drive(admitted, display)
    show_job(out, job_status(service.view(admitted.job.name)))


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="Name of the job; all jobs when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show jobs as they are now: every process is looked at."""
    service = _service()
    views = [service.view(name)] if name else service.views()
    jobs = [job_status(view) for view in views]
    if as_json:
        values = [job.model_dump(mode="json") for job in jobs]
        print_json(values[0] if name else {"jobs": values})
        return
    if not jobs:
        out.print("no job is recorded; start one with `headrace up JOB.toml`")
    for index, job in enumerate(jobs):
        if index:
            out.print()
        show_job(out, job)


@app.command()
def logs(
    name: JobName,
    process: Annotated[str | None, typer.Argument(help="One process; all of them when left out.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 50,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they grow.")] = False,
) -> None:
    """Show the logs of a job's processes."""
    job = _service().store.get(name)
    paths = [job.log_of(unit) for unit in ([process] if process else job.unit_names)]
    if following:
        for source, line in follow(paths, lines):
            _log_line(source, line, prefix=process is None)
        return
    for path in paths:
        for line in tail(path, lines):
            _log_line(path.stem, line, prefix=process is None)
    if not any(path.exists() for path in paths):
        why = "it was removed" if job.units else "nothing was started"
        err.print(Text(f"no log in {job.run.log_dir}: {why}"), soft_wrap=True)


@app.command()
def down(name: JobName) -> None:
    """Stop a job: every process that was started for it, and nothing else."""
    job = _service().stop(name, say=lambda text: err.print(Text(text, style="dim"), soft_wrap=True))
    out.print(Text(f"{job.name}: {job.phase}; logs stay in {job.run.log_dir}"), soft_wrap=True)


@app.command()
def audit(
    name: JobName,
    requests: Annotated[
        int, typer.Option(min=1, help="At most so many of those that the router has kept; probes where it has none.")
    ] = AuditBody().requests,
    as_json: AsJson = False,
) -> None:
    """Replay finished requests without cache and compare. Exit code 0: they agree, 1: stale or corrupt KV, 3: nothing
    could be judged."""
    try:
        found = _service().audit(name, requests)
    except AuditFailed as error:
        _fail(str(error), code=NOT_AUDITED)
    status = audit_status(found)
    if as_json:
        print_json(status.model_dump(mode="json"))
    else:
        show_audit(out, found, status.outcome)
    if status.outcome != "agrees":
        raise typer.Exit(1 if status.outcome == "disagrees" else NOT_AUDITED)


@app.command()
def doctor(
    python: Annotated[str | None, typer.Option(help="Interpreter of the engine stack; this one when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: libraries, limits, ports, packages, CPU and GPUs, each finding with its mend."""
    found = diagnose(python or sys.executable, home_folder())
    if as_json:
        print_json([one.as_dict() for one in found])
    else:
        show_diagnosis(out, found)
    if any(one.verdict == "fail" for one in found):
        raise typer.Exit(1)


app.command()(cli_serve.serve)


def _service() -> JobService:
    return local_service(home_folder())


def _log_line(source: str, line: str, *, prefix: bool) -> None:
    sys.stdout.write(f"{source} | {line}\n" if prefix else f"{line}\n")
    sys.stdout.flush()


def _fail(text: str, code: int = 1) -> NoReturn:
    err.print(Text(text, style="red"), soft_wrap=True)
    sys.exit(code)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
