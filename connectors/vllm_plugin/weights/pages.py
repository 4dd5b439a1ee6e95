"""Host memory for the modules that a load opens, used again from one group to the next.

`load.py` has it for one load, `layers.py` puts fresh tensors there. Memory from the allocator would be touched for the
first time by every group, and stay behind in pieces between what modules are packed into.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence

import torch


def _sizes_and_references(mappings: Sequence[mmap.mmap]) -> Iterator[tuple[int, int]]:
    for mapping in mappings:
        yield len(mapping), sys.getrefcount(mapping)


((_, _UNUSED_REFERENCES),) = _sizes_and_references([mmap.mmap(-1, 1)])
"""What is counted where no tensor is left; Python's versions differ."""


class Pages:
    """Mappings of the kernel's; each is used again once every tensor in it is gone."""

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one, contiguous and not empty, in memory whose pages are all there. Values are left
        behind."""
        mapping = self._unused(tensor.nbytes) or self._new(tensor.nbytes)
        return torch.frombuffer(mapping, dtype=tensor.dtype).view(tensor.shape)

    def _unused(self, nbytes: int) -> mmap.mmap | None:
        # What still computes with an earlier tensor keeps it: some kernels take over what was loaded as it is.
        wanted = (nbytes, _UNUSED_REFERENCES)
        found = enumerate(_sizes_and_references(self._mappings))
        return next((self._mappings[index] for index, each in found if each == wanted), None)

    def _new(self, nbytes: int) -> mmap.mmap:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        self._mappings.append(mapping)
        return mapping
