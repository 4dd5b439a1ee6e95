"""`headrace events`: what happened to jobs. Reads the state folder, whether or not a `headrace serve` runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from orchestrator.api.event_schemas import event_list, event_status
from orchestrator.cli_show import print_json
from orchestrator.compose import local_service
from orchestrator.store.events import EventStore, StoredEvent
from orchestrator.store.home import home_folder

LOOK_EVERY_S = 0.5
PAGE = 1000


def events(
    name: Annotated[str | None, typer.Argument(help="Name of the job; all jobs when left out.")] = None,
    since: Annotated[int | None, typer.Option(min=0, help="Only those behind this number, the oldest first.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=PAGE, help="At most so many of the newest.")] = 50,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they happen.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow an object per line.")] = False,
) -> None:
    """Show what happened to jobs: phases, processes, updates of the weights, who took them over."""
    store = local_service(home_folder()).store
    if name is not None:
        store.get(name)
    found = store.events.newest(lines, name) if since is None else store.events.since(since, PAGE, name)
    if as_json and not following:
        print_json(event_list(found, since or 0).model_dump(mode="json"))
        return
    _print(found, as_json=as_json)
    if following:
        _follow(store.events, found[-1].seq if found else since or store.events.newest_seq(), name, as_json=as_json)


def _follow(store: EventStore, seq: int, name: str | None, *, as_json: bool) -> None:
    while True:
        found = store.since(seq, PAGE, name)
        _print(found, as_json=as_json)
        seq = found[-1].seq if found else seq
        if len(found) < PAGE:
            time.sleep(LOOK_EVERY_S)


def _print(found: Sequence[StoredEvent], *, as_json: bool) -> None:
    for each in found:
        sys.stdout.write(event_status(each).model_dump_json() if as_json else _line(each))
        sys.stdout.write("\n")
    sys.stdout.flush()


def _line(stored: StoredEvent) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.at))
    return f"{stored.seq}  {at}  {stored.job}  {stored.event.text}"
