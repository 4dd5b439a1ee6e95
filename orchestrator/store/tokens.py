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
    """Write a new token to `path`, mode 0600, whatever was there. At every moment the file holds a whole token.

    Raises:
        StateUnusable: it cannot be written.
    """
    begun = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            begun.replace(path)
        finally:
            begun.unlink(missing_ok=True)
    except OSError as error:
        raise StateUnusable(path, error) from error


def kept_token(path: Path) -> str:
    """The token in `path`, made where there is none.

    Raises:
        StateUnusable: it can be neither read nor written.
        TokensRefused: others can read it.
    """
    if not path.exists():
        write_fresh_token(path)
    try:
        with path.open(encoding="ascii") as file:
            _refuse_others(path, file.fileno())
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StateUnusable(path, error) from error
    if token:
        return token
    write_fresh_token(path)
    return kept_token(path)


def read_roles(path: Path) -> dict[str, Role]:
    """Tokens with their roles: a TOML file of lines `"the token" = "viewer"`.

    Raises:
        TokensRefused: it cannot be read, others can read it, or it says something else. No text repeats a token.
    """
    try:
        with path.open("rb") as file:
            _refuse_others(path, file.fileno())
            table = tomllib.load(file)
    except (OSError, ValueError) as error:
        # A parser's message may repeat what it does not understand.
        why = error.strerror if isinstance(error, OSError) else "it is not valid TOML in UTF-8"
        raise TokensRefused(f'{path}: {why}; write lines of the form "TOKEN" = "viewer"') from None
    for number, (token, role) in enumerate(table.items(), start=1):
        if not token or role not in ROLES:
            raise TokensRefused(f"{path}: entry {number} is no token with one of the roles {', '.join(ROLES)}")
    return table


def _refuse_others(path: Path, fd: int) -> None:
    if stat.S_IMODE(os.fstat(fd).st_mode) & _OTHERS:
        raise TokensRefused(f"{path}: others can read or write it; `chmod 600 {path}`")
