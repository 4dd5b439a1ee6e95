"""Bearer tokens in files that only their owner can read: one per run for the router, one per state folder for the
control API, and the API's further ones with their roles."""

from __future__ import annotations

import os
import secrets
import stat
import tomllib
from pathlib import Path
from typing import Literal, get_args

from orchestrator.errors import HeadraceError
from orchestrator.store.home import StateUnusable

Role = Literal["viewer", "trainer", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each includes those before it. viewer: look at everything. trainer: also update weights. admin: everything."""
TOKEN_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class TokensRefused(HeadraceError):
    """Tokens for the control API cannot be used as they are given."""


def write_fresh_token(path: Path) -> None:
    """Write a new token to `path`, mode 0600, whatever was there.

    Raises:
        StateUnusable: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    except OSError as error:
        raise StateUnusable(path, error) from error


def kept_token(path: Path) -> str:
    """The token in `path`, made at the first call.

    Raises:
        StateUnusable: it can be neither read nor written.
    """
    if not path.exists():
        write_fresh_token(path)
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StateUnusable(path, error) from error


def read_roles(path: Path) -> dict[str, Role]:
    """Tokens with their roles: a TOML file of lines `"the token" = "viewer"`.

    Raises:
        TokensRefused: it cannot be read, others can read it, or it says something else. No text repeats a token.
    """
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & _OTHERS:
                raise TokensRefused(f"{path}: others can read or write it; `chmod 600 {path}`")
            table = tomllib.load(file)
    except (OSError, ValueError) as error:
        # A parser's message may repeat what it does not understand.
        why = error.strerror if isinstance(error, OSError) else "it is not valid TOML in UTF-8"
        raise TokensRefused(f'{path}: {why}; write lines of the form "TOKEN" = "viewer"') from None
    for number, (token, role) in enumerate(table.items(), start=1):
        if not token or role not in ROLES:
            raise TokensRefused(f"{path}: entry {number} is no token with one of the roles {', '.join(ROLES)}")
    return table
