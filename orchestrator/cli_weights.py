"""`headrace weights`: push new weights into a running job, cancel that, look at what it serves and how updates went."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.api.pages import LONGEST_PAGE, NUMBERS_END, PAGE
from orchestrator.api.weight_schemas import PushBody, UpdateStatus, WeightsStatus
from orchestrator.cli_common import AsJson, JobName, control_of
from orchestrator.cli_show import print_model
from orchestrator.errors import UpdateUnknown
from orchestrator.exit_codes import ExitCode
from orchestrator.spec.weights import InFlightMode, Strategy

app = typer.Typer(help="New weights for a running job.", no_args_is_help=True, pretty_exceptions_enable=False)
out = Console()


@app.command()
def push(
    context: typer.Context,
    name: JobName,
    source: Annotated[
        Path, typer.Argument(help="Folder with a checkpoint, or a JSON file with the `source` that a publisher gave.")
    ],
    version: Annotated[
        str | None, typer.Option(help="Name of these weights. A folder needs one; a publisher's source has its own.")
    ] = None,
    strategy: Annotated[Strategy | None, typer.Option(help="As in the job file when left out.")] = None,
    in_flight: Annotated[InFlightMode | None, typer.Option(help="As in the job file when left out.")] = None,
    load_mode: Annotated[LoadMode | None, typer.Option(help="As in the job file when left out.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it has ended, or return once it is noted.")] = True,
    as_json: AsJson = False,
) -> None:
    """Bring new weights to all engines of a job. Exit code 1 where they were not committed."""
    control = control_of(context)
    options = {"strategy": strategy, "in_flight": in_flight, "load_mode": load_mode}
    try:
        body = PushBody.model_validate({"source": _read_source(source), "version": version, **options})
    except ValidationError as error:
        raise typer.BadParameter(f"{source}: {error.errors()[0]['msg']}") from error
    update = control.push(name, body)
    if wait:
        update = control.update_seen_through(name, update.number)
    _print(update, as_json=as_json)
    if wait and update.outcome != "committed":
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def cancel(
    context: typer.Context,
    name: JobName,
    number: Annotated[
        int | None,
        typer.Option(min=1, max=NUMBERS_END - 1, help="Number of the update; the newest when left out."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it has ended, or return once it is noted.")] = True,
    as_json: AsJson = False,
) -> None:
    """End an update: called off where no engine has begun to load, else the fleet goes back. Exit code 1 where it was
    committed before."""
    control = control_of(context)
    if number is None:
        newest = control.weights(name).last
        if newest is None:
            raise UpdateUnknown(f"job {name!r} has had no update")
        number = newest.number
    update = control.cancel(name, number)
    if wait:
        update = control.update_seen_through(name, update.number)
    _print(update, as_json=as_json)
    if update.outcome == "committed":
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def status(context: typer.Context, name: JobName, as_json: AsJson = False) -> None:
    """What a job serves, and what is under way."""
    found = control_of(context).weights(name)
    if as_json:
        print_model(found)
    else:
        _show(found)


@app.command()
def history(
    context: typer.Context,
    name: JobName,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=LONGEST_PAGE, help="At most so many updates, the newest.")
    ] = PAGE,
    as_json: AsJson = False,
) -> None:
    """The updates of a job since it was started, and what else a person should know of its weights."""
    found = control_of(context).updates(name, lines)
    if as_json:
        print_model(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("update", "version", "strategy", "asked", "took", "outcome", ""):
        table.add_column(column)
    for each in found.updates:
        took = "" if each.ended_at is None else f"{each.ended_at - each.asked_at:.1f} s"
        how = each.outcome or "under way"
        table.add_row(str(each.number), each.version, each.strategy, _clock(each.asked_at), took, how, each.why)
    out.print(table)
    for remark in found.remarks:
        out.print(Text(f"{_clock(remark.at)}  {remark.text}"), soft_wrap=True)


def _read_source(source: Path) -> dict[str, Any]:
    if source.is_dir():
        return {"transport": "path", "path": str(source.absolute())}
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        mend = "give a checkpoint's folder, or a file with a publication's `source`"
        raise typer.BadParameter(f"{source} is neither a folder nor a file with JSON ({error}); {mend}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{source} holds no JSON object; write a publication's `source` to it")
    return found


def _show(found: WeightsStatus) -> None:
    if found.served is None:
        out.print("the job has not come up yet")
    else:
        out.print(Text(f"serves {found.served.version} in epoch {found.served.epoch}"), soft_wrap=True)
    if found.course is not None:
        course = found.course
        group = f" ({', '.join(course.group)})" if course.group else ""
        why = f": {course.why}" if course.why else ""
        text = f"update {course.update} to {course.version}, going {course.going}: {course.phase}{group}{why}"
        out.print(Text(text), soft_wrap=True)
    if found.last is not None:
        out.print(Text(f"last: {_line(found.last)}"), soft_wrap=True)


def _print(update: UpdateStatus, *, as_json: bool) -> None:
    if as_json:
        print_model(update)
    else:
        out.print(Text(_line(update)), soft_wrap=True)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _line(update: UpdateStatus) -> str:
    how = update.outcome or "under way"
    took = "" if update.ended_at is None else f" after {update.ended_at - update.asked_at:.1f} s"
    return f"update {update.number}, version {update.version}: {how}{took}{': ' + update.why if update.why else ''}"
