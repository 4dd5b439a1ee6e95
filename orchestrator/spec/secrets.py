"""Which values of a job file are secret, told by their names. What is shown, told or logged leaves them out; what they
are for gets them by its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LEFT_OUT = "(left out)"
_ENDINGS = (
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "apikey",
    "_key",
    "-key",
)
_LEAST_CHARS = 6
"""Shorter ones are left out where they stand, and not looked for in other texts, which are full of such."""


def is_secret(name: str) -> bool:
    """HF_TOKEN, AWS_SECRET_ACCESS_KEY; not a path to one, as in TOKEN_FILE."""
    return name.lower().endswith(_ENDINGS)


def without_secrets(value: Any, name: str = "") -> Any:
    """`value` as it may be shown. `name`: what it is the value of."""
    if is_secret(name) and value is not None and not isinstance(value, bool):
        return LEFT_OUT
    if isinstance(value, Mapping):
        return {key: without_secrets(below, str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(below) for below in value]
    return value


def secrets_in(value: Any, name: str = "") -> Iterator[str]:
    """Those that are long enough to be looked for elsewhere."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from secrets_in(below, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from secrets_in(below, name)
    elif isinstance(value, str) and is_secret(name) and len(value) >= _LEAST_CHARS:
        yield value


def blank(text: str, secrets: frozenset[str]) -> str:
    """`text` with each of `secrets` replaced."""
    # Longest first: one may be a part of another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, LEFT_OUT)
    return text
