"""Expert routing of a split request: the prompt's rows from the prefill engine, the output's from the decode engine.

A reply's `routed_experts` is the base64 text of a `.npy` file with a row per token that went through the model: all
but the last sampled one. The prefill engine ran the prompt and sampled one token that nobody sees, so its rows are the
prompt's. The decode engine was given the prompt's KV: whatever rows it has for it are no routing of this prompt, and
of its own the last ones count, one less than it has sampled. `reply.py` joins them.
"""

from __future__ import annotations

import ast
import binascii
import math
import struct
from dataclasses import dataclass

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A `.npy` file, format 1.0 and in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def row_bytes(self) -> int:
        """A dtype is spelled `<u2`: byte order, kind, bytes of one number."""
        return math.prod(self.shape[1:]) * int(self.dtype[2:])


def join_experts(prompt: bytes, output: bytes, *, output_tokens: int) -> bytes | None:
    """Both engines' base64 texts made one; None where they don't fit together."""
    try:
        first, second = _read(prompt), _read(output)
    except (ValueError, SyntaxError, TypeError, LookupError, struct.error):
        return None
    wanted = output_tokens - 1
    if (first.dtype, first.shape[1:]) != (second.dtype, second.shape[1:]) or not 0 <= wanted <= second.shape[0]:
        return None
    tail = second.data[len(second.data) - wanted * second.row_bytes :]
    shape = (first.shape[0] + wanted, *first.shape[1:])
    return _write(_Rows(dtype=first.dtype, shape=shape, data=first.data + tail))


def _read(text: bytes) -> _Rows:
    data = binascii.a2b_base64(text, strict_mode=True)
    if not data.startswith(_MAGIC):
        raise ValueError("not a .npy file of format 1.0")
    (length,) = struct.unpack_from("<H", data, len(_MAGIC))
    start = len(_MAGIC) + 2
    header = ast.literal_eval(data[start : start + length].decode("latin-1"))
    rows = _Rows(dtype=header["descr"], shape=header["shape"], data=data[start + length :])
    if header["fortran_order"] or len(rows.data) != rows.shape[0] * rows.row_bytes:
        raise ValueError("not rows in C order")
    return rows


def _write(rows: _Rows) -> bytes:
    header = f"{{'descr': {rows.dtype!r}, 'fortran_order': False, 'shape': {rows.shape!r}, }}"
    padding = -(len(_MAGIC) + 2 + len(header) + 1) % _ALIGNMENT
    text = (header + " " * padding + "\n").encode("latin-1")
    return binascii.b2a_base64(_MAGIC + struct.pack("<H", len(text)) + text + rows.data, newline=False)
