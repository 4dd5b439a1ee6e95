"""NIXL's agent as both sides use it: driven by us, and memory registered once.

`server.py` has one for what it serves, `transport.py` one to read with.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INFINIBAND = Path("/sys/class/infiniband")


def make_agent() -> Any:
    """An agent without a thread of its own: NIXL's polls without pause, also when idle, and takes a whole core from the
    trainer or the engine. Who waits for a transfer drives it; a producer drives its agent while it is attended.

    Safe to use from several threads.
    """
    _leave_out_infiniband_where_there_is_none()
    # Imported late: it starts UCX, which the environment must have been prepared for.
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return nixl_agent(f"headrace-{uuid.uuid4().hex}", nixl_agent_config(enable_prog_thread=False, sync_mode=sync))


def _leave_out_infiniband_where_there_is_none() -> None:
    """UCX's module for it crashes the process at its end (seen with NIXL 1.5.1's wheel: its libnl, in a destructor),
    and a trainer whose ranks crash after their last step has failed for its launcher."""
    if not any(INFINIBAND.glob("*")):
        os.environ.setdefault("UCX_MODULES", "^ib")


def memory_of(tensor: torch.Tensor) -> tuple[str, int]:
    """NIXL's name of its kind of memory, and the device there."""
    return ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)


MemoryRegion = tuple[int, int, int]
"""Address, bytes and device of a storage."""


@dataclass(slots=True)
class _Entry:
    storage: torch.UntypedStorage
    handle: Any
    uses: int = 0


class Registered:
    """The memory that an agent may move: each storage once, however many tensors lie in it, as long as somebody uses
    it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._entries: dict[MemoryRegion, _Entry] = {}
        self._kept: set[MemoryRegion] = set()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register for good."""
        for tensor in tensors:
            region = _region(tensor)
            if region not in self._kept:
                self.use([tensor])
                self._kept.add(region)

    def use(self, tensors: Iterable[torch.Tensor]) -> list[MemoryRegion]:
        """Register what is not yet, all or none. What it answers is for `unuse`."""
        used: list[MemoryRegion] = []
        try:
            for tensor in tensors:
                used.append(self._use(tensor))
        except BaseException:
            self.unuse(used)
            raise
        return used

    def _use(self, tensor: torch.Tensor) -> MemoryRegion:
        region = _region(tensor)
        if region not in self._entries:
            memory, device = memory_of(tensor)
            handle = self._agent.register_memory([(*region[:2], device, "")], memory)
            self._entries[region] = _Entry(tensor.untyped_storage(), handle)
        self._entries[region].uses += 1
        return region

    def unuse(self, regions: Iterable[MemoryRegion]) -> None:
        """Drop what nobody uses any more."""
        for region in regions:
            entry = self._entries[region]
            entry.uses -= 1
            if not entry.uses:
                self._agent.deregister_memory(entry.handle)
                del self._entries[region]

    def unuse_all(self) -> None:
        for entry in self._entries.values():
            self._agent.deregister_memory(entry.handle)
        self._entries.clear()
        self._kept.clear()


def _region(tensor: torch.Tensor) -> MemoryRegion:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), tensor.get_device()
