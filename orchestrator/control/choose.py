"""Which control plane a command speaks to: the one that it is told; else the `headrace serve` of the state folder;
where none runs, the state folder itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.control.plane import ControlPlane
from orchestrator.errors import ServerUnusable
from orchestrator.store.listening import announced_in
from orchestrator.store.locks import ControlPlaneLock
from orchestrator.store.tokens import TokensRefused

TOKEN_VARIABLE = "HEADRACE_API_TOKEN"
ANSWERS_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Told:
    """By options and the environment."""

    server: str | None
    token_file: Path | None


def control_plane(home: Path, told: Told, warn: Callable[[str], None]) -> ControlPlane:
    """Neither of the two is loaded before it is needed: most of a quick command's time goes into that."""
    # Taken out: a job that is started from here must not inherit it.
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if told.server:
        _refuse_no_url(told.server)
        from orchestrator.control.over_http import HttpControlPlane

        return HttpControlPlane(told.server, _token(told.token_file, token), is_local=False)
    return _found(home, warn) or _local(home)


def _refuse_no_url(server: str) -> None:
    """Raises `ServerUnusable`. One that is well-formed may still lead nowhere."""
    try:
        parts = urlsplit(server)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_url = False
    if not is_url:
        mend = "give one such as http://127.0.0.1:8700 as --server or HEADRACE_URL"
        raise ServerUnusable(f"{server!r} is no URL of a `headrace serve`; {mend}")


def _token(file: Path | None, of_environment: str) -> str:
    """Raises `TokensRefused`, which does not repeat it."""
    where = TOKEN_VARIABLE if file is None else str(file)
    try:
        token = of_environment if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise TokensRefused(f"{where} cannot be read as a token: {error}") from error
    if not (token.isascii() and (token.isprintable() or not token)):
        raise TokensRefused(f"{where} has characters that a token cannot have; give printable ASCII")
    return token


def _found(home: Path, warn: Callable[[str], None]) -> ControlPlane | None:
    listening, lock = announced_in(home), ControlPlaneLock(home)
    if listening is None or not lock.held_by_anyone():
        return None
    from orchestrator.control.over_http import HttpControlPlane

    found = HttpControlPlane(listening.url, listening.token, is_local=True)
    if found.answers(ANSWERS_WITHIN_S):
        return found
    which = f"the `headrace serve` at {listening.url} (pid {lock.holder()})"
    warn(f"{which} does not answer; this works on {home} without it. Where that is locked, end that process")
    return None


def _local(home: Path) -> ControlPlane:
    from orchestrator.compose import local_service
    from orchestrator.control.local import LocalControlPlane

    return LocalControlPlane(local_service(home))
