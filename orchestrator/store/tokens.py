"""Bearer tokens in files that only their owner can read: one per run for the router, one per state folder for the
control API."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from orchestrator.store.home import StateUnusable

TOKEN_BYTES = 32


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
