"""One client of a Mooncake volume that holds weights: objects put, ranges read, errors as words.

`store.py` reads with it and `connectors/publisher/store.py` writes. The volume has a master of its own, apart from
the KV pool's: vLLM's external reset removes all objects of its master, pinned ones and those of other tenants
included.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from connectors.mooncake import METADATA_SERVER, TCP_ENVIRONMENT, Protocol

LOCAL_BUFFER_BYTES = 16 << 20
"""For small objects that Mooncake copies itself; pieces go straight between registered memory and the volume."""
CALL_BYTES = 256 << 20
"""Read in one call: Mooncake fails a call that takes longer than the objects' lease."""
ERRORS = {
    -1: "internal error of the store",
    -200: "the volume has no room left",
    -600: "memory is not registered",
    -704: "no such object",
    -706: "somebody reads it",
    -707: "it took longer than the objects' lease",
    -800: "the transfer failed: a storage client is gone or can't be reached",
    -900: "the master can't be reached",
}

Memory = tuple[int, int]
"""Address and length of a storage."""


class StoreError(Exception):
    """The volume refused or failed. `key` is the first object concerned."""

    def __init__(self, what: str, code: int, key: str = "") -> None:
        told = ERRORS.get(code, "see Mooncake's error codes")
        super().__init__(f"{what}: {told} ({code}{f', {key}' if key else ''})")
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Where the volume is, and how this machine takes part."""

    master: str
    """host:port of the weights' own master."""
    protocol: Protocol
    host: str | None
    """The address by which peers reach this machine; None: that of the route to the master."""
    devices: tuple[str, ...]
    """Network devices for rdma; none: Mooncake chooses."""
    lend_bytes: int
    """Memory that this process adds to the volume. It is gone with the process: storage clients should own it."""


@dataclass(frozen=True, slots=True)
class RangeRead:
    """Bytes of one object, and the registered memory that they go to."""

    key: str
    start: int
    into: torch.Tensor


class StoreClient:
    """Connected on creation. Not to be used by two threads at once. Calls block as long as Mooncake likes."""

    def __init__(self, volume: Volume) -> None:
        if volume.protocol == "tcp":
            for name, value in TCP_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        # Imported late: it reads its environment when it starts.
        from mooncake.store import MooncakeDistributedStore

        self.mooncake: Any = MooncakeDistributedStore()
        code = self.mooncake.setup(
            volume.host or _route_to(volume.master),
            METADATA_SERVER,
            volume.lend_bytes,
            LOCAL_BUFFER_BYTES,
            volume.protocol,
            ",".join(volume.devices),
            volume.master,
        )
        if code:
            raise StoreError(f"connecting to the volume of {volume.master}", code)
        self._registered: dict[Memory, torch.UntypedStorage] = {}

    def register(self, tensors: Iterable[torch.Tensor]) -> set[Memory]:
        """Let the volume read and write the memory behind these tensors, whole storages at a time; holds on to it.

        Returns what was not registered before."""
        added = set()
        for tensor in tensors:
            storage, memory = tensor.untyped_storage(), memory_of(tensor)
            if not storage.nbytes() or memory in self._registered:
                continue
            code = self.mooncake.register_buffer(*memory)
            if code:
                raise StoreError(f"registering {storage.nbytes()} bytes of memory", code)
            self._registered[memory] = storage
            added.add(memory)
        return added

    def forget(self, memories: Iterable[Memory]) -> None:
        """Register these no longer, and let go of them."""
        for memory in memories:
            self.mooncake.unregister_buffer(memory[0])
            del self._registered[memory]

    def forget_all_but(self, memories: Set[Memory]) -> None:
        self.forget(self._registered.keys() - memories)

    def put(self, objects: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Put contiguous, registered tensors, safe from eviction. On a failure some may be there."""
        pointers = [tensor.data_ptr() for _, tensor in objects]
        keys = [key for key, _ in objects]
        codes = self.mooncake.batch_put_from(keys, pointers, [tensor.nbytes for _, tensor in objects], _pinned())
        for key, code in zip(keys, codes, strict=True):
            if code:
                raise StoreError("putting weights", code, key)

    def put_text(self, key: str, text: bytes) -> None:
        code = self.mooncake.put(key, text, _pinned())
        if code:
            raise StoreError("putting a manifest", code, key)

    def text(self, key: str) -> bytes:
        text: bytes = self.mooncake.get(key)
        if not text:
            raise StoreError("reading a manifest", -704, key)
        return text

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Which of these are not there. Those that are get a new lease."""
        codes = self.mooncake.batch_is_exist(list(keys))
        for key, code in zip(keys, codes, strict=True):
            if code not in (0, 1):
                raise StoreError("looking for weights", code, key)
        return [key for key, code in zip(keys, codes, strict=True) if not code]

    def read(self, reads: Sequence[RangeRead]) -> None:
        for batch in batches(reads):
            self._read_batch(batch)

    def _read_batch(self, reads: Sequence[RangeRead]) -> None:
        results = self.mooncake.get_into_ranges(
            [read.into.data_ptr() for read in reads],
            [[read.key] for read in reads],
            [[[0]] for _ in reads],
            [[[read.start]] for read in reads],
            [[[read.into.nbytes]] for read in reads],
        )
        for read, ((count,),) in zip(reads, results, strict=True):
            if count != read.into.nbytes:
                raise StoreError("reading weights", count, read.key)

    def remove_matching(self, regex: str, *, even_if_read: bool) -> None:
        """Remove what matches; what has a lease stays, unless told otherwise."""
        code = self.mooncake.remove_by_regex(regex, even_if_read)
        if code < 0:
            raise StoreError("removing weights", code)

    def close(self) -> None:
        self.forget_all_but(set())
        self.mooncake.close()


def batches(reads: Iterable[RangeRead]) -> Iterator[list[RangeRead]]:
    """As many as one call may read."""
    batch: list[RangeRead] = []
    size = 0
    for read in reads:
        if batch and size + read.into.nbytes > CALL_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.into.nbytes
    if batch:
        yield batch


def memory_of(tensor: torch.Tensor) -> Memory:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _pinned() -> Any:
    from mooncake.store import ObjectDataType, ReplicateConfig

    config = ReplicateConfig()
    config.with_hard_pin = True
    config.data_type = ObjectDataType.WEIGHT
    return config


def _route_to(master: str) -> str:
    """This machine's address towards the master; connecting a datagram socket sends nothing."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        address: str = probe.getsockname()[0]
    return address
