"""What commands share: their arguments, how a shell completes these, and the control plane that they speak to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from orchestrator.control.choose import Told, control_plane
from orchestrator.control.plane import ControlPlane
from orchestrator.errors import HeadraceError
from orchestrator.store.database import Database, database_file
from orchestrator.store.home import home_folder
from orchestrator.store.jobs import JobStore

err = Console(stderr=True)


def control_of(context: typer.Context) -> ControlPlane:
    told = context.find_object(Told)
    assert told is not None, "the app's callback has made it"
    return control_plane(home_folder(), told, warn)


def warn(text: str) -> None:
    err.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    return _matching(context, incomplete, lambda store: store.names())


def complete_process(context: typer.Context, incomplete: str) -> list[str]:
    return _matching(context, incomplete, lambda store: store.get(context.params["name"]).unit_names)


def complete_replica(context: typer.Context, incomplete: str) -> list[str]:
    def engines(store: JobStore) -> list[str]:
        return [engine.name for engine in store.get(context.params["name"]).plan.engines]

    return _matching(context, incomplete, engines)


def _matching(context: typer.Context, incomplete: str, names: Callable[[JobStore], list[str]]) -> list[str]:
    """From the state folder alone: a shell does not wait for a server. Nothing is created, and no error shown."""
    home = home_folder()
    if context.find_root().params.get("server") or not database_file(home).exists():
        return []
    with suppress(HeadraceError):
        return [name for name in names(JobStore(Database(home))) if name.startswith(incomplete)]
    return []


JobName = Annotated[str, typer.Argument(help="Name of the job.", autocompletion=complete_job)]
AnyJobName = Annotated[
    str | None, typer.Argument(help="Name of the job; all jobs when left out.", autocompletion=complete_job)
]
Process = Annotated[
    str, typer.Argument(help="Name of the process, as `headrace status` shows it.", autocompletion=complete_process)
]
Replica = Annotated[
    str, typer.Argument(help="Name of the engine, as `headrace status` shows it.", autocompletion=complete_replica)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the HTTP API answers.")]
