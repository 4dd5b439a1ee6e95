"""A disk whose first read hangs, as that of a file server that is gone does; the next ones work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def hanging_disk(delay_s: float | None = None) -> Iterator[Callable[[], None]]:
    """Until what it gives is called, its end, or for so long."""
    back, first = threading.Event(), threading.Lock()
    preadv = os.preadv

    def read(*arguments: Any) -> int:
        if first.acquire(blocking=False):
            back.wait(delay_s)
        return preadv(*arguments)

    with mock.patch("os.preadv", read):
        try:
            yield back.set
        finally:
            back.set()
