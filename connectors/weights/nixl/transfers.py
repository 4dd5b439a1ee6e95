"""The planned reads of one reader as NIXL transfers: prepared once, posted at every load.

`reads.py` plans, `transport.py` decides when. What stays the same between loads is kept: descriptors of the producers'
memory always, those of this side as long as the targets of a group stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from connectors.weights.nixl.agent import memory_of
from connectors.weights.nixl.reads import Runs, Way
from connectors.weights.source import FetchError

INITIATOR = "NIXL_INIT_AGENT"
SPIN_S = 0.002
"""A short transfer is waited for without sleep."""
POLL_S = 0.00005
LOOK_EVERY_S = 0.05
"""Between two looks at whether producers live."""

Numbers = Any
"""numpy's arrays of integers."""


@dataclass(slots=True)
class Transfer:
    """One posted read of many runs from one producer."""

    handle: Any
    producer: int
    nbytes: int
    state: str = "PROC"


@dataclass(slots=True)
class _Kept:
    """Transfers of one group to the same targets."""

    transfers: list[Transfer]
    lists: list[Any]
    """Of descriptors, which the transfers use."""


@dataclass(slots=True)
class _Remote:
    """One way's runs of one group, with the producer's descriptors prepared."""

    way: Way
    handle: Any
    targets: Numbers
    offsets: Numbers
    lengths: Numbers


@dataclass(slots=True)
class GroupTransfers:
    """One group's reads."""

    agent: Any
    remotes: list[_Remote]
    kept: dict[tuple[int, ...], _Kept] = field(default_factory=dict)
    """By the addresses of the targets."""

    @classmethod
    def prepare(cls, agent: Any, agents: Sequence[str], ways: Mapping[Way, Runs]) -> GroupTransfers:
        """`agents`: NIXL's names of the producers."""
        return cls(agent, [_prepare_remote(agent, agents[way.producer], way, runs) for way, runs in ways.items()])

    def into(self, targets: Mapping[int, torch.Tensor]) -> list[Transfer]:
        """Those that read the pieces of these numbers into tensors that are contiguous and registered."""
        key = tuple(part for number, target in targets.items() for part in (number, target.data_ptr()))
        if key not in self.kept:
            self.kept[key] = self._make(targets)
        return self.kept[key].transfers

    def post(self, transfers: Sequence[Transfer]) -> None:
        """Begin to read."""
        for transfer in transfers:
            transfer.state = self.agent.transfer(transfer.handle)

    def forget_targets(self) -> None:
        """Free what belongs to targets; nothing may be in flight."""
        for kept in self.kept.values():
            for handle in (*(transfer.handle for transfer in kept.transfers), *kept.lists):
                handle.release()
        self.kept.clear()

    def free(self) -> None:
        self.forget_targets()
        for remote in self.remotes:
            remote.handle.release()

    def _make(self, targets: Mapping[int, torch.Tensor]) -> _Kept:
        kept = _Kept([], [])
        for place in {memory_of(target) for target in targets.values()}:
            here = {number: target.data_ptr() for number, target in targets.items() if memory_of(target) == place}
            for remote in self.remotes:
                self._add_transfer(kept, remote, place, here)
        return kept

    def _add_transfer(self, kept: _Kept, remote: _Remote, place: tuple[str, int], addresses: Mapping[int, int]) -> None:
        """The runs of one way that end in one kind of memory."""
        numbers = np.fromiter(addresses.keys(), np.int64, len(addresses))
        (chosen,) = np.nonzero(np.isin(remote.targets, numbers))
        if not len(chosen):
            return
        memory, device = place
        bases = np.zeros(numbers.max() + 1, dtype=np.uint64)
        bases[numbers] = np.fromiter(addresses.values(), np.uint64, len(addresses))
        starts = bases[remote.targets[chosen]] + remote.offsets[chosen].astype(np.uint64)
        lengths = remote.lengths[chosen]
        local = self.agent.prep_xfer_dlist(INITIATOR, _descriptors(starts, lengths, device), memory)
        every: Numbers = np.arange(len(chosen), dtype=np.int32)
        handle = self.agent.make_prepped_xfer("READ", local, every, remote.handle, chosen.astype(np.int32))
        kept.lists.append(local)
        kept.transfers.append(Transfer(handle, remote.way.producer, int(lengths.sum())))


def wait_for(agent: Any, transfers: Sequence[Transfer], *, timeout_s: float, look: Callable[[], None]) -> None:
    """Until all have completed. FetchError if one fails or takes too long; `look` raises one if it is no use to go
    on."""
    begin = looked = time.monotonic()
    for transfer in transfers:
        while transfer.state == "PROC":
            transfer.state = agent.check_xfer_state(transfer.handle)
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S:
                look()
                looked = now
            if now - begin > timeout_s:
                raise FetchError(f"a read from producer {transfer.producer} has not completed in {timeout_s:g} s")
            if transfer.state == "PROC" and now - begin > SPIN_S:
                time.sleep(POLL_S)
        if transfer.state != "DONE":
            raise FetchError(f"a read from producer {transfer.producer} failed")


def _prepare_remote(agent: Any, name: str, way: Way, runs: Runs) -> _Remote:
    lengths = np.frombuffer(runs.lengths, dtype=np.int64)
    starts = np.frombuffer(runs.addresses, dtype=np.uint64)
    handle = agent.prep_xfer_dlist(name, _descriptors(starts, lengths, way.device), way.memory)
    targets = np.frombuffer(runs.targets, dtype=np.int64)
    offsets = np.frombuffer(runs.offsets, dtype=np.int64)
    return _Remote(way, handle, targets, offsets, lengths)


def _descriptors(starts: Numbers, lengths: Numbers, device: int) -> Numbers:
    table: Numbers = np.empty((len(starts), 3), dtype=np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = starts, lengths, device
    return table
