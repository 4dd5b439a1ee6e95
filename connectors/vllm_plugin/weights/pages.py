"""Host memory for the modules that a load opens, used again from one group to the next.

`layers.py` puts fresh tensors there, `rooms.py` lets go of it when the load is over. Memory from the allocator would be
touched for the first time by every group, and stay behind in pieces between what modules are packed into.
"""

from __future__ import annotations

import mmap
import sys

import torch

_UNUSED_REFERENCES = 3
"""To a mapping whose tensors are gone: the list's, the loop's, the call's."""


class Pages:
    """Mappings of the kernel's; each is used again once every tensor in it is gone."""

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one, contiguous and not empty, in memory whose pages are all there. Values are left
        behind."""
        mapping = self._unused(tensor.nbytes) or self._new(tensor.nbytes)
        return torch.frombuffer(mapping, dtype=tensor.dtype).view(tensor.shape)

    def free(self) -> None:
        self._mappings.clear()

    def _unused(self, nbytes: int) -> mmap.mmap | None:
        for mapping in self._mappings:
            # What still computes with an earlier tensor keeps it: some kernels take over what was loaded as it is.
            if len(mapping) == nbytes and sys.getrefcount(mapping) == _UNUSED_REFERENCES:
                return mapping
        return None

    def _new(self, nbytes: int) -> mmap.mmap:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        self._mappings.append(mapping)
        return mapping
