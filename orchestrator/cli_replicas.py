"""`headrace restart`, `drain` and `undrain`: single processes of a running job."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from orchestrator.api.replica_schemas import request_status
from orchestrator.cli_show import print_json
from orchestrator.compose import local_service
from orchestrator.replica_service import ReplicaService
from orchestrator.store.home import home_folder
from orchestrator.store.keeping import ReplicaRequest

out = Console()

JobName = Annotated[str, typer.Argument(help="Name of the job.")]
Process = Annotated[str, typer.Argument(help="Name of the process, as `headrace status` shows it.")]
Replica = Annotated[str, typer.Argument(help="Name of the engine, as `headrace status` shows it.")]
Force = Annotated[bool, typer.Option(help="Also where nobody could serve meanwhile, or an update is under way.")]
Wait = Annotated[bool, typer.Option(help="Until it has ended; else answer once it is noted.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(app: typer.Typer) -> None:
    for command in (restart, drain, undrain):
        app.command()(command)


def restart(name: JobName, process: Process, force: Force = False, wait: Wait = True, as_json: AsJson = False) -> None:
    """Start a process again. An engine's requests run out first, and its sessions move. Exit code 1 where it is
    refused, or does not come up."""
    replicas = _replicas()
    _show(replicas, name, replicas.restart(name, process, force=force), wait=wait, as_json=as_json)


def drain(name: JobName, replica: Replica, force: Force = False, wait: Wait = True, as_json: AsJson = False) -> None:
    """Send an engine no more requests: its sessions move, and it keeps its weights until it is undrained."""
    replicas = _replicas()
    _show(replicas, name, replicas.drain(name, replica, force=force), wait=wait, as_json=as_json)


def undrain(name: JobName, replica: Replica, wait: Wait = True, as_json: AsJson = False) -> None:
    """Bring a drained engine to what the job serves, and send it requests again."""
    replicas = _replicas()
    _show(replicas, name, replicas.undrain(name, replica), wait=wait, as_json=as_json)


def _replicas() -> ReplicaService:
    return local_service(home_folder()).replicas


def _show(replicas: ReplicaService, name: str, request: ReplicaRequest, *, wait: bool, as_json: bool) -> None:
    if wait:
        request = replicas.see_through(name, request.number)
    if as_json:
        print_json(request_status(request).model_dump(mode="json"))
    else:
        how = request.outcome or "asked"
        took = "" if request.ended_at is None else f" after {request.ended_at - request.asked_at:.1f} s"
        note = f": {request.note}" if request.note else ""
        text = f"request {request.number}, {request.kind} {request.unit}: {how}{took}{note}"
        out.print(Text(text), soft_wrap=True)
    if wait and request.outcome != "done":
        raise typer.Exit(1)
