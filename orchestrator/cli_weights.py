"""`headrace weights`: push new weights into a running job, cancel that, look at what it serves and how updates went."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.api.weight_schemas import UpdateStatus, WeightsStatus, update_list, update_status, weights_status
from orchestrator.cli_show import print_json
from orchestrator.compose import local_service
from orchestrator.errors import UpdateRefused, UpdateUnknown
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.store.home import home_folder
from orchestrator.weight_service import PushOptions, WeightService

app = typer.Typer(help="New weights for a running job.", no_args_is_help=True, pretty_exceptions_enable=False)
out = Console()

JobName = Annotated[str, typer.Argument(help="Name of the job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def push(
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
    weights = _weights()
    options = PushOptions(strategy=strategy, in_flight=in_flight, load_mode=load_mode)
    record = weights.push(name, version, _read_source(source), options)
    if wait:
        record = weights.see_through(name, record.number)
    _print(update_status(record), as_json=as_json)
    if wait and record.outcome != "committed":
        raise typer.Exit(1)


@app.command()
def cancel(
    name: JobName,
    number: Annotated[int | None, typer.Option(help="Number of the update; the newest when left out.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it has ended, or return once it is noted.")] = True,
    as_json: AsJson = False,
) -> None:
    """End an update: called off where no engine has begun to load, else the fleet goes back. Exit code 1 where it was
    committed before."""
    weights = _weights()
    if number is None:
        newest = weights.newest(name)
        if newest is None:
            raise UpdateUnknown(f"job {name!r} has had no update")
        number = newest.number
    record = weights.cancel(name, number)
    if wait:
        record = weights.see_through(name, record.number)
    _print(update_status(record), as_json=as_json)
    if record.outcome == "committed":
        raise typer.Exit(1)


@app.command()
def status(name: JobName, as_json: AsJson = False) -> None:
    """What a job serves, and what is under way."""
    weights = _weights()
    found = weights_status(weights.position(name), weights.newest(name))
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        _show(found)


@app.command()
def history(name: JobName, as_json: AsJson = False) -> None:
    """The updates of a job since it was started, and what else a person should know of its weights."""
    weights = _weights()
    found = update_list(weights.history(name), weights.remarks(name))
    if as_json:
        print_json(found.model_dump(mode="json"))
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


def _weights() -> WeightService:
    return local_service(home_folder()).weights


def _read_source(source: Path) -> dict[str, Any]:
    """Raises `UpdateRefused`."""
    if source.is_dir():
        return {"transport": "path", "path": str(source.absolute())}
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        mend = "give a checkpoint's folder, or a file with a publication's `source`"
        raise UpdateRefused(f"{source} is neither a folder nor a file with JSON ({error}); {mend}") from error
    if not isinstance(found, dict):
        raise UpdateRefused(f"{source} holds no JSON object; write a publication's `source` to it")
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
        print_json(update.model_dump(mode="json"))
    else:
        out.print(Text(_line(update)), soft_wrap=True)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _line(update: UpdateStatus) -> str:
    how = update.outcome or "under way"
    took = "" if update.ended_at is None else f" after {update.ended_at - update.asked_at:.1f} s"
    return f"update {update.number}, version {update.version}: {how}{took}{': ' + update.why if update.why else ''}"
