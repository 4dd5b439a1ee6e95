"""`headrace serve`: who may call the control API, and where it listens."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from orchestrator.errors import HeadraceError
from orchestrator.store.home import home_folder
from orchestrator.store.listening import announced, forget_announced, listening_at
from orchestrator.store.locks import ControlPlaneLock
from orchestrator.store.tokens import Role, TokensRefused, kept_token, read_roles

if TYPE_CHECKING:
    from orchestrator.service import JobService

TOKEN_VARIABLES: dict[str, Role] = {
    "HEADRACE_API_TOKEN": "admin",
    "HEADRACE_TRAINER_TOKEN": "trainer",
    "HEADRACE_VIEWER_TOKEN": "viewer",
}
ADMIN_TOKEN_FILE = "api-token"
LAST_REPLIES_S = 10
"""How long a server that is told to end waits for open replies, of which a log that is followed never ends."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: else one asks on a connection that is just being closed."""
err = Console(stderr=True)


class AddressUnusable(HeadraceError):
    """The control API cannot listen where it was told to."""


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8700,
    tokens: Annotated[
        Path | None, typer.Option(help='TOML file of lines "TOKEN" = "viewer" (trainer, admin), for you alone (0600).')
    ] = None,
) -> None:
    """Answer the HTTP control API: POST /jobs, GET /jobs/{name}, DELETE /jobs/{name}, ...

    Callers send a bearer token: one of --tokens, the value of HEADRACE_API_TOKEN (an admin), HEADRACE_TRAINER_TOKEN or
    HEADRACE_VIEWER_TOKEN, or, where none of them is an admin's, that of the file api-token in the state folder.
    """
    from orchestrator.compose import local_service

    home = home_folder()
    run_server(local_service(home), home, host, port, tokens)


def run_server(service: JobService, home: Path, host: str, port: int, tokens: Path | None) -> None:
    """Answer until the process is told to end."""
    where = _where_tokens_are(tokens)
    given = given_tokens(tokens, os.environ)
    if not given and not _is_loopback(host):
        mend = "give tokens with --tokens or HEADRACE_API_TOKEN, or listen on 127.0.0.1"
        raise TokensRefused(f"--host {host} can be reached from other machines, and nobody was given a token; {mend}")
    ControlPlaneLock(home).take()
    if "admin" not in given.values():
        # Whoever reaches the API can start programs, and loopback is open to every user of the machine.
        given[kept_token(home / ADMIN_TOKEN_FILE)] = "admin"
        where = [f"the file {home / ADMIN_TOKEN_FILE}", *where]
        err.print(Text(f"the admin's bearer token is in {home / ADMIN_TOKEN_FILE}"), soft_wrap=True)
    forget_announced(home)
    # Before the jobs of an earlier control plane are taken over.
    listener = listen(host, port)
    # Loading the web framework takes longer than most other commands run.
    import uvicorn

    from orchestrator.api.access import Access
    from orchestrator.api.server import build_app

    listening = listening_at(host, port)
    access = Access({**given, listening.token: "admin"}, f"tokens are in {', '.join(where)}")
    app = build_app(service, access, announced(home, listening))
    given.clear()
    _leave_signals_to_the_server()
    config = uvicorn.Config(
        app, log_level="info", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=LAST_REPLIES_S
    )
    server = uvicorn.Server(config)
    err.print(Text(f"the control API is at http://{f'[{host}]' if ':' in host else host}:{port}"), soft_wrap=True)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(1)


def _leave_signals_to_the_server() -> None:
    """It ends by SIGINT and SIGTERM in its own way, and raises what ended it once more. A terminal that is closed ends
    it as SIGTERM does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _sent, _frame: signal.raise_signal(signal.SIGTERM))


def listen(host: str, port: int) -> socket.socket:
    """Raises `AddressUnusable`."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                mend = "another program listens there: end it, or give this one another --port"
            case errno.EACCES:
                mend = "ports below 1024 are for root: give another --port"
            case _:
                mend = "give an address of this machine as --host"
        # Python goes on with the address, which stands here already.
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise AddressUnusable(f"--host {host} --port {port}: {reason}; {mend}") from error


def _where_tokens_are(file: Path | None) -> list[str]:
    """Of those that were given, in words."""
    named = [f"the variable {name} of `headrace serve`" for name in TOKEN_VARIABLES if os.environ.get(name)]
    return [*([] if file is None else [f"the file {file}"]), *named]


def given_tokens(file: Path | None, environment: MutableMapping[str, str]) -> dict[str, Role]:
    """Of the file and of the environment, which loses them: what is started from here inherits it.

    Raises:
        TokensRefused: the file cannot be used.
    """
    tokens = read_roles(file) if file is not None else {}
    for variable, role in TOKEN_VARIABLES.items():
        if token := environment.pop(variable, ""):
            tokens[token] = role
    return tokens


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
