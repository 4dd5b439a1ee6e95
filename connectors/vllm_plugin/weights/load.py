"""The one load path: group by group make room, fetch into it, finish it, free it.

`rank.py` opens a version and agrees with the other ranks before and after. What brings the bytes is a `Fetch`: a
transport (`gpu_fetch`) or a copy in host memory (`host_copy.py`, `cpu_prefetch`). Nothing here knows which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from connectors.vllm_plugin.weights import layers
from connectors.vllm_plugin.weights.geometry import Region
from connectors.vllm_plugin.weights.numbers import GroupNumbers, LoadNumbers
from connectors.vllm_plugin.weights.plan import Group, LoadPlan
from connectors.weights.source import Fetch, FetchError, Target


@dataclass(slots=True)
class _Room:
    """Where the pieces of one group go."""

    opened: list[nn.Module]
    targets: list[Target]
    parameters: list[torch.Tensor]
    """Per target its part of a parameter; the target itself, where the bytes go straight there."""

    def put_back(self) -> None:
        """The modules have their old tensors again."""
        while self.opened:
            layers.put_back(self.opened.pop())

    def staged(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self.targets, self.parameters, strict=True)
        return [(target.into, parameter) for target, parameter in pairs if target.into is not parameter]


class Load:
    """One load of one version into one rank's model."""

    def __init__(
        self, model: nn.Module, plan: LoadPlan, fetch: Fetch, *, check_finite: bool, attention_dtype: torch.dtype
    ) -> None:
        self.numbers = LoadNumbers()
        self.wrote = False
        """Whether parameters that the engine computes with may differ from before."""
        self._model = model
        self._plan = plan
        self._fetch = fetch
        self._check_finite = check_finite
        self._attention_dtype = attention_dtype

    def run(self, go_on: Callable[[], None]) -> None:
        """Fill every parameter. `go_on` is asked before each group and raises FetchError where the load must end.

        Raises FetchError, or what vLLM's processing raises. `wrote` says then whether the old weights are whole.
        """
        with torch.no_grad():
            ahead: _Room | None = None
            for index in range(len(self._plan.groups)):
                go_on()
                ahead = self._load_group(index, ahead)
            self._finish_model()

    def _load_group(self, index: int, room: _Room | None) -> _Room | None:
        """Returns the room of the next group, where it was begun ahead."""
        group = self._plan.groups[index]
        started = time.perf_counter()
        room = room or self._make_room(group)
        try:
            self.wrote = self.wrote or _writes_at_once(room)
            moved = self._fetch.fetch(index, room.targets)
            if self._check_finite:
                refuse_non_finite(room.targets)
        except BaseException:
            room.put_back()
            raise
        ahead = self._begin_ahead(index + 1)
        copy_s, process_s = self._finish(group, room)
        for producer, count in moved.by_producer.items():
            self.numbers.by_producer[producer] = self.numbers.by_producer.get(producer, 0) + count
        seconds = time.perf_counter() - started
        self.numbers.groups.append(
            GroupNumbers(group.name, moved.bytes, seconds, moved.wait_s, moved.transfer_s, copy_s, process_s)
        )
        return ahead

    def _begin_ahead(self, index: int) -> _Room | None:
        """Where a group needs no memory of its own, its bytes may come while the one before is finished."""
        if index == len(self._plan.groups) or not _needs_no_memory(self._plan.groups[index]):
            return None
        room = self._make_room(self._plan.groups[index])
        self.wrote = self.wrote or _writes_at_once(room)
        self._fetch.start(index, room.targets)
        return room

    def _make_room(self, group: Group) -> _Room:
        modules = [self._model.get_submodule(name) for name in group.processed]
        # Modules keep a few tensors while they are open; those are in use and get their values at the end of the group.
        in_use = {id(tensor) for module in modules for tensor in module._parameters.values()}
        room = _Room([], [], [])
        for module in modules:
            layers.open_module(module)
            room.opened.append(module)
        for fill in group.fills:
            tensor = self._tensor(fill.parameter)
            part = part_of(tensor, fill.into)
            is_staged = fill.is_cast or id(tensor) in in_use
            into = _staging(fill.piece.shape, fill.sent_dtype, part.device) if is_staged else part
            stays = not is_staged and fill.parameter.rpartition(".")[0] not in group.processed
            room.targets.append(Target(fill.piece, into, stays=stays))
            room.parameters.append(part)
        return room

    def _tensor(self, name: str) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self._model.get_submodule(module), leaf)
        return tensor

    def _finish(self, group: Group, room: _Room) -> tuple[float, float]:
        """Seconds of copying and of processing."""
        staged = room.staged()
        self.wrote = self.wrote or bool(staged or room.opened or group.paddings)
        started = time.perf_counter()
        for padding in group.paddings:
            part_of(self._tensor(padding.parameter), padding.into).fill_(padding.value)
        for staging, parameter in staged:
            parameter.copy_(staging)
        copied = time.perf_counter()
        try:
            while room.opened:
                layers.close_module(room.opened[-1])
                room.opened.pop()
        except BaseException:
            # Torn, but the next load must find the tensors whose addresses the engine knows.
            room.put_back()
            raise
        return copied - started, time.perf_counter() - copied

    def _finish_model(self) -> None:
        processed = {name for group in self._plan.groups for name in group.processed}
        for module in layers.tied_to(self._model, processed):
            layers.process_again(module)
        layers.process_attention(self._model, self._attention_dtype)
        if any(parameter.is_cuda for parameter in self._model.parameters()):
            torch.cuda.synchronize()


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A part of a parameter, as plans name it: counted from where the parameter begins."""
    return tensor.as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)


def _staging(shape: Sequence[int], dtype: str, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)


def _writes_at_once(room: _Room) -> bool:
    """Whether fetching the group changes parameters that the engine computes with."""
    return any(target.stays for target in room.targets)


def _needs_no_memory(group: Group) -> bool:
    return not group.processed and not any(fill.is_cast for fill in group.fills)


def refuse_non_finite(targets: Sequence[Target]) -> None:
    """Raises FetchError that lists the tensors with a value that is infinite or no number."""
    names = {
        target.piece.tensor
        for target in targets
        if target.into.is_floating_point() and not bool(torch.isfinite(target.into.float()).all())
    }
    if names:
        listed = sorted(names)
        raise FetchError(f"values that are infinite or no numbers in {', '.join(listed[:20])}", listed)
