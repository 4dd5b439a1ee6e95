"""Rows of expert routing as engines send them, for the tests of replies and streams."""

from __future__ import annotations

import base64
import struct

WIDTH = 6
"""Numbers in a row: layers times experts per token."""


def npy(rows: list[int], *, dtype: str = "|u1", order: bool = False, shape: str | None = None) -> str:
    """A `.npy` file in base64 with rows of one repeated number."""
    header = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape or (len(rows), 2, 3)}, }}\n"
    data = b"".join(bytes([row]) * WIDTH for row in rows)
    return base64.b64encode(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data).decode()


def rows_of(text: str) -> list[int]:
    data = base64.b64decode(text)
    (length,) = struct.unpack_from("<H", data, 8)
    assert (10 + length) % 64 == 0
    header, body = data[10 : 10 + length].decode(), data[10 + length :]
    assert f"'shape': ({len(body) // WIDTH}, 2, 3)" in header
    return list(body[::WIDTH])
