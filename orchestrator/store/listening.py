"""Where the control plane of a state folder listens, for the commands of its own user on this machine.

`cli_serve.py` announces it; `control/choose.py` reads it. It counts only while the control plane's lock is held.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.store.home import StateUnusable
from orchestrator.store.tokens import TOKEN_BYTES

FILE_NAME = "control-plane.json"


@dataclass(frozen=True, kw_only=True)
class Listening:
    url: str
    token: str
    """An admin's, for this life of the control plane."""


def listening_at(host: str, port: int) -> Listening:
    """As it is reached from this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        reached = host or "127.0.0.1"
    else:
        loopback = "127.0.0.1" if address.version == 4 else "::1"
        reached = loopback if address.is_unspecified else str(address)
    authority = f"[{reached}]" if ":" in reached else reached
    return Listening(url=f"http://{authority}:{port}", token=secrets.token_urlsafe(TOKEN_BYTES))


def forget_announced(home: Path) -> None:
    """What an earlier control plane left that was killed."""
    (home / FILE_NAME).unlink(missing_ok=True)


@contextmanager
def announced(home: Path, listening: Listening) -> Iterator[None]:
    """Meanwhile it stands in the state folder, for its owner alone.

    Raises:
        StateUnusable: it cannot be written.
    """
    path = home / FILE_NAME
    try:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(asdict(listening), file)
    except OSError as error:
        raise StateUnusable(path, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def announced_in(home: Path) -> Listening | None:
    """None where none is announced."""
    try:
        return Listening(**json.loads((home / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
