"""A reader's NIXL agent, with all that hangs on it: registered targets, receive buffers, prepared transfers.

`transport.py` keeps one over all loads and throws it away after a failure: what may still be in flight then ends with
the agent, and cannot write into targets that a later load has filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from connectors.weights.nixl.agent import MemoryRegion, Registered, make_agent
from connectors.weights.nixl.messages import Layout
from connectors.weights.nixl.reads import Reader, plan_reads
from connectors.weights.nixl.transfers import GroupTransfers, Transfer, wait_for
from connectors.weights.source import FetchError, Target
from connectors.weights.tensors import Piece

BUFFER_BYTES = 64 << 20
"""Of a receive buffer; more only where a single piece is larger."""
ALIGNMENT = 64

Groups = Sequence[Sequence[Piece]]
Look = Callable[[], None]
"""Raises a FetchError when it is no use to wait on."""


@dataclass(slots=True)
class Posted:
    """A group on its way into those of its targets that are dense."""

    targets: Sequence[Target]
    transfers: list[Transfer]
    devices: set[torch.device]
    """GPUs that are written to."""
    passing: list[MemoryRegion]
    """Registered for this one fetch."""
    rest: list[dict[int, Target]]
    """What goes by way of the receive buffer, as much at a time as it holds."""
    stays: bool
    """All targets do."""


@dataclass(slots=True)
class Prepared:
    """The reads of one load plan from one layout."""

    layout: Layout
    groups: Groups
    reader: Reader
    transfers: list[GroupTransfers]
    producers: frozenset[int]
    """From which anything is read."""
    posted: dict[int, Posted] = field(default_factory=dict)
    """By group. Whoever comes with the very same targets again need not have them looked through."""

    def fits(self, layout: Layout, groups: Groups, reader: Reader) -> bool:
        return self.layout.name == layout.name and self.groups is groups and self.reader == reader


class Session:
    """Not for several threads at once."""

    def __init__(self) -> None:
        self._agent = make_agent()
        self._registered = Registered(self._agent)
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._prepared: Prepared | None = None

    def prepared(self, layout: Layout, groups: Groups, reader: Reader) -> Prepared | None:
        """What was prepared before, if it fits."""
        fits = self._prepared is not None and self._prepared.fits(layout, groups, reader)
        return self._prepared if fits else None

    def prepare(self, layout: Layout, groups: Groups, reader: Reader) -> Prepared:
        """Plan all reads anew, instead of what was prepared before."""
        self._forget_prepared()
        plan = plan_reads(
            groups,
            tensors=layout.tensors,
            producers=[producer.regions for producer in layout.producers],
            reader=reader,
        )
        if plan.uncovered:
            raise FetchError(f"no producer has all of: {', '.join(plan.uncovered)}", plan.uncovered)
        producers = frozenset(way.producer for ways in plan.groups for way in ways)
        for number in producers:
            self._agent.add_remote_agent(layout.producers[number].agent_metadata)
        names = [producer.agent for producer in layout.producers]
        transfers = [GroupTransfers.prepare(self._agent, names, ways) for ways in plan.groups]
        self._prepared = Prepared(layout, groups, reader, transfers, producers)
        return self._prepared

    def post(self, prepared: Prepared, number: int, targets: Sequence[Target]) -> Posted:
        """Begin to read a group."""
        posted = prepared.posted.get(number)
        if posted is None or posted.targets is not targets:
            posted = prepared.posted[number] = self._look_through(prepared.transfers[number], targets)
        for device in posted.devices:
            # Reads don't wait for what is still queued on these tensors.
            torch.cuda.current_stream(device).synchronize()
        prepared.transfers[number].post(posted.transfers)
        return posted

    def finish(self, prepared: Prepared, number: int, *, timeout_s: float, look: Look) -> Iterator[Transfer]:
        """Wait for what was posted, then read the rest by way of the receive buffer. All transfers, completed."""
        group, posted = prepared.transfers[number], prepared.posted[number]
        wait_for(self._agent, posted.transfers, timeout_s=timeout_s, look=look)
        yield from posted.transfers
        for batch in posted.rest:
            received = self._receive_into(batch)
            transfers = group.into(received)
            group.post(transfers)
            wait_for(self._agent, transfers, timeout_s=timeout_s, look=look)
            yield from transfers
            for index, tensor in received.items():
                posted.targets[index].into.copy_(tensor)
            for device in {tensor.device for tensor in received.values() if tensor.is_cuda}:
                # The next batch comes into the same buffer.
                torch.cuda.current_stream(device).synchronize()
        if not posted.stays:
            del prepared.posted[number]
        if posted.passing:
            group.forget_targets()
            self._registered.unuse(posted.passing)

    def close(self) -> None:
        """Give all back. What is still in flight is cancelled, or ends with the agent: afterwards nothing is written
        any more."""
        # Each step counts for itself: after a failure NIXL refuses some of them.
        with suppress(Exception):
            self._forget_prepared()
        with suppress(Exception):
            self._registered.unuse_all()
        self._buffers.clear()
        del self._agent, self._registered

    def _look_through(self, group: GroupTransfers, targets: Sequence[Target]) -> Posted:
        dense = {index: target for index, target in enumerate(targets) if _is_dense(target)}
        self._registered.keep(target.into for target in dense.values() if target.stays)
        passing = self._registered.use(target.into for target in dense.values() if not target.stays)
        transfers = group.into({index: target.into for index, target in dense.items()})
        devices = {target.into.device for target in dense.values() if target.into.is_cuda}
        stays = all(target.stays for target in targets)
        return Posted(targets, transfers, devices, passing, list(_batches(targets)), stays)

    def _receive_into(self, batch: Mapping[int, Target]) -> dict[int, torch.Tensor]:
        """A dense tensor for each, in the buffers of their devices."""
        needed: dict[torch.device, int] = {}
        for target in batch.values():
            needed[target.into.device] = needed.get(target.into.device, 0) + _room(target)
        for device, nbytes in needed.items():
            if device not in self._buffers or self._buffers[device].nbytes < nbytes:
                self._buffers[device] = torch.empty(max(nbytes, BUFFER_BYTES), dtype=torch.uint8, device=device)
                self._registered.keep([self._buffers[device]])
        received = {}
        used = dict.fromkeys(needed, 0)
        for number, target in batch.items():
            into, start = target.into, used[target.into.device]
            vector = self._buffers[into.device][start : start + into.nbytes]
            received[number] = vector.view(into.dtype).view(into.shape)
            used[into.device] += _room(target)
        return received

    def _forget_prepared(self) -> None:
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            # Whoever still has it holds no handles, and with them the agent.
            transfers, prepared.transfers = prepared.transfers, []
            prepared.posted.clear()
            for of_group in transfers:
                of_group.free()
            for number in prepared.producers:
                self._agent.remove_remote_agent(prepared.layout.producers[number].agent)


def _is_dense(target: Target) -> bool:
    return bool(target.into.is_contiguous())


def _room(target: Target) -> int:
    return -(-int(target.into.nbytes) // ALIGNMENT) * ALIGNMENT


def _batches(targets: Sequence[Target]) -> Iterator[dict[int, Target]]:
    """The targets that are not dense, as many at a time as the receive buffer holds."""
    batch: dict[int, Target] = {}
    used = 0
    for number, target in enumerate(targets):
        if _is_dense(target):
            continue
        if batch and used + _room(target) > BUFFER_BYTES:
            yield batch
            batch, used = {}, 0
        batch[number] = target
        used += _room(target)
    if batch:
        yield batch
