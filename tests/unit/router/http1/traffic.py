"""Bytes that nobody should send, and a transport without a socket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.eof = False
        self.closing = False

    def write(self, data: Any) -> None:
        assert not self.eof, "written after the end"
        self.written += data

    def writelines(self, pieces: Iterable[Any]) -> None:
        self.write(b"".join(pieces))

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def mutated(seeds: Sequence[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Seeds in a row, with bytes changed, cut out and put in, in pieces."""

    @st.composite
    def traffic(draw: st.DrawFn) -> list[bytes]:
        stream = bytearray(b"".join(draw(st.lists(st.sampled_from(seeds), min_size=1, max_size=5))))
        for _ in range(draw(st.integers(0, 4))):
            at = draw(st.integers(0, len(stream)))
            stream[at : at + draw(st.integers(0, 3))] = draw(st.sampled_from(seeds) | st.binary(max_size=3))
        cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=5)))
        edges = [0, *cuts, len(stream)]
        return [bytes(stream[start:end]) for start, end in itertools.pairwise(edges) if start < end]

    return traffic()
