"""`cpu_prefetch`: this rank's slices in host memory, fetched by a thread while the engine generates.

`rank.py` starts a `Prefetch` and gives its copy to the load path, for which it is a `Fetch` like any other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from connectors.vllm_plugin.weights.load import refuse_non_finite
from connectors.vllm_plugin.weights.settings import WeightSettings
from connectors.weights.source import Fetch, FetchError, Moved, Target
from connectors.weights.tensors import ITEM_BYTES, Piece, TensorMeta

ALIGNMENT = 256
"""Bytes. Starts of pieces: as wide as any copy engine likes them."""
CPU_SHARE = 0.05
"""Part of the time in which a prefetch reads beside an engine that computes on a CPU: measured, tokens take 2.5 times
as long while it reads."""
_CUDA_SUCCESS = 0


class HostCopy:
    """Room in host memory for all pieces of a plan: pinned where there is a GPU."""

    def __init__(self, groups: Sequence[Sequence[Piece]], manifest: Mapping[str, TensorMeta], *, is_kept: bool) -> None:
        """`is_kept`: for later loads too, so that transports may keep it registered."""
        self.version: str | None = None
        """Of what it holds; None while that is no whole version."""
        self.stamps: Mapping[str, str] = {}
        """Of what it was filled from."""
        self.groups = groups
        self.manifest = dict(manifest)
        sizes = [[_nbytes(piece, manifest) for piece in group] for group in groups]
        total = sum(_aligned(size) for group in sizes for size in group)
        self._memory = torch.empty(total + ALIGNMENT, dtype=torch.uint8)
        self._pinned = _pin(self._memory)
        self._memory.zero_()
        offset = -self._memory.data_ptr() % ALIGNMENT
        self.targets: list[list[Target]] = []
        for group, group_sizes in zip(groups, sizes, strict=True):
            targets = []
            for piece, size in zip(group, group_sizes, strict=True):
                dtype = getattr(torch, manifest[piece.tensor].dtype)
                into = self._memory[offset : offset + size].view(dtype).view(piece.shape)
                targets.append(Target(piece, into, stays=is_kept))
                offset += _aligned(size)
            self.targets.append(targets)

    def fits(self, groups: Sequence[Sequence[Piece]], manifest: Mapping[str, TensorMeta]) -> bool:
        return groups is self.groups and manifest == self.manifest

    def release(self) -> None:
        """The memory must not be used any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def _nbytes(piece: Piece, manifest: Mapping[str, TensorMeta]) -> int:
    return piece.count * ITEM_BYTES[manifest[piece.tensor].dtype]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pin(memory: torch.Tensor) -> bool:
    """torch's own pinned memory comes in powers of two: up to twice as much as is needed."""
    if not torch.cuda.is_available():
        return False
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != _CUDA_SUCCESS:
        raise FetchError(f"{memory.nbytes} bytes of host memory could not be pinned (CUDA error {int(status)})")
    return True


class CopiedFetch:
    """A filled host copy as a `Fetch`."""

    def __init__(self, copy: HostCopy) -> None:
        self._copy = copy

    @property
    def manifest(self) -> Mapping[str, TensorMeta]:
        return self._copy.manifest

    @property
    def stamps(self) -> Mapping[str, str]:
        return self._copy.stamps

    def start(self, group: int, targets: Sequence[Target]) -> None:
        """One copy after the other is as fast as the bus."""

    def fetch(self, group: int, targets: Sequence[Target]) -> Moved:
        started = time.perf_counter()
        moved = Moved()
        for target, source in zip(targets, self._copy.targets[group], strict=True):
            target.into.copy_(source.into, non_blocking=True)
            moved.bytes += source.into.nbytes
        if any(target.into.is_cuda for target in targets):
            torch.cuda.current_stream().synchronize()
        moved.transfer_s = time.perf_counter() - started
        return moved

    def close(self) -> None:
        """Whoever made the copy keeps or releases it."""


class Prefetch:
    """One version on its way into host memory."""

    def __init__(
        self,
        source: dict[str, Any],
        open_fetch: Callable[[], Fetch],
        make_copy: Callable[[Fetch], HostCopy],
        *,
        settings: WeightSettings,
        check_finite: bool,
        limit_s: float,
    ) -> None:
        """`open_fetch` and `make_copy` are called on the prefetching thread."""
        self.source = source
        self.copy: HostCopy | None = None
        """Filled, once `wait` has returned."""
        self.moved: list[Moved] = []
        self._open_fetch = open_fetch
        self._make_copy = make_copy
        self._settings = settings
        self._check_finite = check_finite
        self._deadline = time.monotonic() + limit_s
        self._share = settings.prefetch_share or (1.0 if torch.cuda.is_available() else CPU_SHARE)
        self._cancelled = False
        self._hurried = threading.Event()
        self._error: Exception | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, name="headrace-prefetch", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def failed(self) -> str:
        """Why; empty while it runs and when it is done."""
        return "" if self.running or self._error is None else str(self._error)

    def wait(self, limit_s: float) -> HostCopy:
        """The engine stands still: no pauses any more. Raises FetchError where the copy did not become whole."""
        self._hurried.set()
        self._thread.join(limit_s)
        if self.running:
            self.cancel()
            raise FetchError(f"the prefetch of {self.source['version']} has not ended within {limit_s:.0f} s")
        if self._error is not None:
            raise self._error
        assert self.copy is not None
        return self.copy

    def cancel(self) -> None:
        """Ends at the next group."""
        self._cancelled = True
        self._hurried.set()

    def _run(self) -> None:
        try:
            if self._settings.fetch_cores:
                os.sched_setaffinity(0, self._settings.fetch_cores)
            if self._device is not None:
                # Each thread has a current device of its own.
                torch.cuda.set_device(self._device)
            self._fill()
        except Exception as error:
            self._error = error

    def _fill(self) -> None:
        fetch = self._open_fetch()
        try:
            copy = self._make_copy(fetch)
            copy.version, copy.stamps = None, fetch.stamps
            busy_since = time.monotonic()
            for index, targets in enumerate(copy.targets):
                if self._cancelled:
                    raise FetchError(f"the prefetch of {self.source['version']} was given up")
                if time.monotonic() > self._deadline:
                    raise FetchError(f"the prefetch of {self.source['version']} took longer than its limit")
                self.moved.append(fetch.fetch(index, targets))
                if self._check_finite:
                    refuse_non_finite(targets)
                if index + 1 < len(copy.targets):
                    self._hurried.wait((time.monotonic() - busy_since) * (1 / self._share - 1))
                    busy_since = time.monotonic()
                    # Through shared memory this is when the bytes are copied.
                    fetch.start(index + 1, copy.targets[index + 1])
            copy.version = self.source["version"]
            self.copy = copy
        finally:
            fetch.close()
