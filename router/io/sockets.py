"""Sockets towards the engines: a peer that vanished without a word is noticed by the kernel.

`upstream.py` gives `open_socket` to its pool of connections. A leg may be silent for hours while its engine works, so
silence alone says nothing; a machine that no longer answers the kernel's own questions does.
"""

from __future__ import annotations

import socket
from typing import Any

GONE_AFTER_S = 60
"""So long may a peer's kernel leave data or questions without an answer."""
_ASK_AFTER_S = 15
_ASK_EVERY_S = 5

_OPTIONS = {
    "TCP_KEEPIDLE": _ASK_AFTER_S,
    "TCP_KEEPINTVL": _ASK_EVERY_S,
    "TCP_KEEPCNT": (GONE_AFTER_S - _ASK_AFTER_S) // _ASK_EVERY_S,
    "TCP_USER_TIMEOUT": GONE_AFTER_S * 1000,
}


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for one of `getaddrinfo`'s answers, with the options that this platform has."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
