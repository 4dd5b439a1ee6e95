"""`headrace`: argument parsing, one call of the control plane, output.

`control/` is what commands speak to, `exit_codes.py` how they end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from orchestrator import cli_events, cli_replicas, cli_serve, cli_weights
from orchestrator.api.audit_schemas import MOST_REQUESTS, AuditBody
from orchestrator.api.pages import MOST_LOG_LINES
from orchestrator.api.schemas import JobStatus
from orchestrator.api.wire import Note
from orchestrator.cli_common import AnyJobName, AsJson, JobName, complete_process, control_of, err, warn
from orchestrator.cli_show import (
    StartDisplay,
    print_json,
    print_model,
    show_audit,
    show_diagnosis,
    show_job,
    show_plan,
)
from orchestrator.control.choose import Told
from orchestrator.control.plane import ControlPlane
from orchestrator.errors import HeadraceError
from orchestrator.exit_codes import MEANINGS, ExitCode, exit_code_of
from orchestrator.plan.types import plan_to_json
from orchestrator.signals import ignore_interruptions, raise_interruptions
from orchestrator.spec.job import JobSpec
from orchestrator.spec.load import load_job_file
from orchestrator.store.home import home_folder

JOBS_AT_ONCE = 8

app = typer.Typer(
    help="Runs disaggregated prefill/decode vLLM fleets for RL rollouts.",
    epilog="Exit codes. " + ". ".join(f"{code.value}: {meaning}" for code, meaning in MEANINGS.items()) + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_weights.app, name="weights")
app.command()(cli_events.events)
cli_replicas.add_commands(app)
out = Console()

JobFile = Annotated[Path, typer.Argument(help="Job file, .toml or .json.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="field=value, stronger than the job file.")]


def main() -> None:
    """Entry point: errors meant for a user become one message on stderr, and an exit code."""
    raise_interruptions()
    try:
        app(prog_name="headrace")
    except HeadraceError as error:
        err.print(Text(str(error), style="red"), soft_wrap=True)
        sys.exit(exit_code_of(error))
    except SystemExit as end:
        # What typer makes of Ctrl-C.
        if end.code == ExitCode.INTERRUPTED:
            ignore_interruptions()
            err.print("interrupted; `headrace status` says whether anything is left", highlight=False)
        raise


@app.callback()
def connection(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            envvar="HEADRACE_URL",
            help="URL of the `headrace serve` to ask, with the token in HEADRACE_API_TOKEN. Left out: the one on the "
            "state folder, if any runs.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="File with the token for --server."),
    ] = None,
) -> None:
    context.obj = Told(server=server, token_file=token_file)


@app.command()
def render(context: typer.Context, job: JobFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show the whole plan and every generated file. Starts nothing."""
    from orchestrator.plan.build import refuse_errors

    plan = control_of(context).plan(_read_job(job, overrides))
    if as_json:
        sys.stdout.write(plan_to_json(plan))
    else:
        show_plan(out, plan)
    # Once more: what is shown is thousands of lines long.
    refuse_errors(plan)


@app.command()
def up(context: typer.Context, job: JobFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Start a job and wait until it serves; one that lives from the same job file already is shown. On failure or
    Ctrl-C, everything that was started is ended."""

    def warn_of(notes: Sequence[Note]) -> None:
        for note in notes:
            warn(f"{note.field}: {note.problem}; {note.mend}")

    spec = _read_job(job, overrides)
    with StartDisplay(err) as display:
        found = control_of(context).start(spec, warn=warn_of, progress=display)
    if as_json:
        print_model(found)
    else:
        show_job(out, found)


@app.command()
def status(context: typer.Context, name: AnyJobName = None, as_json: AsJson = False) -> None:
    """Show jobs as they are now: every process is looked at. With --json {"jobs": [...]} where no name is given."""
    control = control_of(context)
    if name is not None:
        jobs = [control.job(name)]
    else:
        with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
            jobs = [job for job in pool.map(partial(_job_if_any, control), control.names()) if job is not None]
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
    context: typer.Context,
    name: JobName,
    process: Annotated[
        str | None,
        typer.Argument(help="One process; all of them when left out.", autocompletion=complete_process),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=MOST_LOG_LINES, help="Last lines of each log.")
    ] = 50,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they grow, until the job ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help='Print {"process": ..., "line": ...} for each line.')] = False,
) -> None:
    """Show the logs of a job's processes."""
    has_any = False
    for found in control_of(context).logs(name, process, lines, following=following):
        has_any = True
        if as_json:
            text = json.dumps(found._asdict())
        else:
            text = found.line if process else f"{found.process} | {found.line}"
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    if lines and not has_any:
        err.print(Text(f"the logs of {process or name} are empty: nothing was started, or they were removed"))


@app.command()
def down(
    context: typer.Context,
    name: JobName,
    forget: Annotated[bool, typer.Option("--forget", help="Delete its record too. Files and logs stay.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a job: every process that was started for it, and nothing else."""
    control = control_of(context)
    job = control.stop(name, lambda text: err.print(Text(text, style="dim"), soft_wrap=True))
    if forget:
        control.forget(name)
    if as_json:
        print_model(job)
    else:
        forgotten = ", and forgotten" if forget else ""
        out.print(Text(f"{name}: {job.phase}{forgotten}; logs stay in {job.directory}/logs"), soft_wrap=True)


@app.command()
def audit(
    context: typer.Context,
    name: JobName,
    requests: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_REQUESTS,
            help="At most so many of those that the router has kept; probes where it has none.",
        ),
    ] = AuditBody().requests,
    as_json: AsJson = False,
) -> None:
    """Replay finished requests without cache and compare. Exit code 0: they agree, 1: stale or corrupt KV, 3: nothing
    could be judged."""
    found = control_of(context).audit(name, requests)
    if as_json:
        print_model(found)
    else:
        show_audit(out, found)
    if found.outcome != "agrees":
        raise typer.Exit(ExitCode.FAILED if found.outcome == "disagrees" else ExitCode.NOT_JUDGED)


@app.command()
def doctor(
    context: typer.Context,
    python: Annotated[str | None, typer.Option(help="Interpreter of the engine stack; this one when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: libraries, limits, ports, packages, CPU and GPUs, each finding with its mend."""
    from orchestrator.observe.doctor import diagnose

    told = context.find_object(Told)
    if told is not None and told.server:
        warn(f"this looks at this machine, not at that of {told.server}")
    found = diagnose(python or sys.executable, home_folder())
    if as_json:
        print_json([one.as_dict() for one in found])
    else:
        show_diagnosis(out, found)
    if any(one.verdict == "fail" for one in found):
        raise typer.Exit(ExitCode.FAILED)


app.command()(cli_serve.serve)


def _read_job(file: Path, overrides: list[str] | None) -> JobSpec:
    """The model's folder as it is found from here: whoever starts the job counts from a folder of its own."""
    spec = load_job_file(file, overrides or [])
    folder = Path(spec.model.path).expanduser()
    if not folder.is_dir():
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(folder.absolute())})})


def _job_if_any(control: ControlPlane, name: str) -> JobStatus | None:
    """One whose record was deleted meanwhile is not missed."""
    try:
        return control.job(name)
    except HeadraceError as error:
        if exit_code_of(error) != ExitCode.UNKNOWN:
            raise
        return None
