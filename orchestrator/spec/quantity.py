"""Sizes, durations and addresses as people write them in a job file. Used by the models of this folder."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 365 * 86400.0
_MOST_BYTES = 2**60
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def parse_duration_s(value: object) -> object:
    """Seconds of "90s", "1.5m", "500ms", or of a number of seconds; anything else is left to pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no duration; write seconds as a number, or a number with ms, s, m, h or d")
    return float(match[1]) * _UNITS_S[match[2]]


def check_host(value: object) -> object:
    """An IP address or a host name that can stand in a URL."""
    if isinstance(value, str) and _is_host(value):
        return value
    raise ValueError("must be an IP address or a host name, without scheme, port or brackets")


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # What has only digits and dots was meant to be an address.
        return _HOST_NAME.fullmatch(text) is not None and not set(text) <= set("0123456789.")
    return "%" not in text


Host = Annotated[str, BeforeValidator(check_host)]

Seconds = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=_LONGEST_S, allow_inf_nan=False)]
"""A positive duration, kept in seconds: at most a year."""

Bytes = Annotated[ByteSize, Field(ge=0, le=_MOST_BYTES)]
"""A size, kept in bytes: an integer, or a string such as "10GB" (10**10) or "10GiB" (10 * 2**30); at most 1 EiB."""

PositiveBytes = Annotated[ByteSize, Field(gt=0, le=_MOST_BYTES)]
Port = Annotated[int, Field(ge=1, le=65535)]
