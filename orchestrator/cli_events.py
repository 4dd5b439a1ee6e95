"""`headrace events`: what happened to jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Annotated

import typer

from orchestrator.api.event_schemas import EventList, EventStatus
from orchestrator.api.pages import LONGEST_PAGE, NUMBERS_END
from orchestrator.cli_common import AnyJobName, AsJson, control_of
from orchestrator.cli_show import print_model


def events(
    context: typer.Context,
    name: AnyJobName = None,
    since: Annotated[
        int | None, typer.Option(min=0, max=NUMBERS_END - 1, help="Only those behind this number, the oldest first.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=LONGEST_PAGE, help="At most so many of the newest.")
    ] = 50,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what happened to jobs: phases, processes, updates of the weights, who took them over. With --follow and
    --json an object per line."""
    control = control_of(context)
    limit = lines if since is None else LONGEST_PAGE
    found = control.events(name, since, limit) if limit else EventList(events=[], next=0)
    if as_json and not following:
        print_model(found)
        return
    _print(found.events, as_json=as_json)
    if following:
        _print(control.new_events(name, found.events[-1].seq if found.events else since), as_json=as_json)


def _print(found: Iterable[EventStatus], *, as_json: bool) -> None:
    for each in found:
        sys.stdout.write(each.model_dump_json() if as_json else _line(each))
        sys.stdout.write("\n")
        sys.stdout.flush()


def _line(event: EventStatus) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    return f"{event.seq}  {at}  {event.job}  {event.text}"
