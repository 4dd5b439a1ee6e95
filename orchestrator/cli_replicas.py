"""`headrace restart`, `drain`, `undrain`: single processes of a running job; `headrace scale`: how many there are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from connectors.types import Role
from orchestrator.api.replica_schemas import MAX_REPLICAS, RequestStatus
from orchestrator.cli_common import AsJson, JobName, Process, Replica, control_of
from orchestrator.cli_show import print_model
from orchestrator.control.plane import ControlPlane
from orchestrator.exit_codes import ExitCode

out = Console()

Force = Annotated[bool, typer.Option(help="Also where nobody could serve meanwhile, or an update is under way.")]
Wait = Annotated[bool, typer.Option(help="Until it has ended; else answer once it is noted.")]


def add_commands(app: typer.Typer) -> None:
    for command in (restart, drain, undrain, scale):
        app.command()(command)


def restart(
    context: typer.Context,
    name: JobName,
    process: Process,
    force: Force = False,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Start a process again. An engine's requests run out first, and its sessions move. Exit code 1 where it does not
    come up."""
    control = control_of(context)
    _show(control, name, control.restart(name, process, force=force), wait=wait, as_json=as_json)


def drain(
    context: typer.Context,
    name: JobName,
    replica: Replica,
    force: Force = False,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Send an engine no more requests: its sessions move, and it keeps its weights until it is undrained."""
    control = control_of(context)
    _show(control, name, control.drain(name, replica, force=force), wait=wait, as_json=as_json)


def undrain(
    context: typer.Context, name: JobName, replica: Replica, wait: Wait = True, as_json: AsJson = False
) -> None:
    """Bring a drained engine to what the job serves, and send it requests again."""
    control = control_of(context)
    _show(control, name, control.undrain(name, replica), wait=wait, as_json=as_json)


def scale(
    context: typer.Context,
    name: JobName,
    role: Annotated[Role, typer.Argument(help="Whose engines.")],
    replicas: Annotated[int, typer.Argument(min=1, max=MAX_REPLICAS, help="How many there are to be.")],
    force: Annotated[bool, typer.Option(help="Also where nobody could serve meanwhile.")] = False,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Give a role another number of engines. New ones get requests once they have what the job serves; of those that
    are too many, the last leave: their requests run out first, and their sessions move."""
    control = control_of(context)
    _show(control, name, control.scale(name, role, replicas, force=force), wait=wait, as_json=as_json)


def _show(control: ControlPlane, name: str, request: RequestStatus, *, wait: bool, as_json: bool) -> None:
    if wait:
        request = control.request_seen_through(name, request.number)
    if as_json:
        print_model(request)
    else:
        how = request.outcome or "asked"
        took = "" if request.ended_at is None else f" after {request.ended_at - request.asked_at:.1f} s"
        note = f": {request.note}" if request.note else ""
        number = f" to {request.replicas}" if request.replicas else ""
        text = f"request {request.number}, {request.kind} {request.process}{number}: {how}{took}{note}"
        out.print(Text(text), soft_wrap=True)
    if wait and request.outcome != "done":
        raise typer.Exit(ExitCode.FAILED)
