"""Where the bytes of each group of a load plan go, and the end of a load: what of the model stays is looked up once.

`planner.py` makes one `Rooms` per plan, `load.py` asks it for a room per group. Looking through all modules of a large
model takes longer than a GPU takes to copy its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from connectors.vllm_plugin.weights import layers
from connectors.vllm_plugin.weights.geometry import Region
from connectors.vllm_plugin.weights.pages import Pages
from connectors.vllm_plugin.weights.plan import Group, LoadPlan
from connectors.weights.source import Target


@dataclass(slots=True)
class Room:
    """Where the pieces of one group go."""

    opened: list[nn.Module]
    targets: list[Target]
    parameters: list[torch.Tensor]
    """Per target its part of a parameter; the target itself, where the bytes go straight there."""
    wholes: list[torch.Tensor]
    """Per target the parameter."""

    def put_back(self) -> None:
        """The modules have their old tensors again."""
        while self.opened:
            layers.put_back(self.opened.pop())

    def staged(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self.targets, self.parameters, strict=True)
        return [(target.into, parameter) for target, parameter in pairs if target.into is not parameter]

    @property
    def writes_at_once(self) -> bool:
        """Whether fetching the group changes parameters that the engine computes with."""
        return any(target.stays for target in self.targets)


class Rooms:
    """See the module text."""

    def __init__(self, model: nn.Module, plan: LoadPlan) -> None:
        self._groups = plan.groups
        self._modules = dict(model.named_modules())
        self._kept: dict[int, Room] = {}
        """Of groups that need no memory of their own."""
        processed = {name for group in plan.groups for name in group.processed}
        self._tied = layers.tied_to(model, processed)
        self._attention = layers.attention_of(model)
        self._is_on_gpu = any(parameter.is_cuda for parameter in model.parameters())

    def room(self, index: int, pages: Pages) -> Room:
        """Modules whose weights are processed are open in it: finish them, or `put_back`."""
        group, kept = self._groups[index], self._kept.get(index)
        if kept is not None and all(
            self._tensor(fill.parameter) is whole for fill, whole in zip(group.fills, kept.wholes, strict=True)
        ):
            return kept
        made = self._make(group, pages)
        if self.needs_no_memory(index):
            self._kept[index] = made
        return made

    def needs_no_memory(self, index: int) -> bool:
        group = self._groups[index]
        return not group.processed and not any(fill.is_cast for fill in group.fills)

    def part(self, parameter: str, region: Region) -> torch.Tensor:
        return part_of(self._tensor(parameter), region)

    def finish(self, attention_dtype: torch.dtype) -> None:
        """What the model needs once all groups are filled."""
        for module in self._tied:
            layers.process_again(module)
        for module in self._attention:
            layers.process_attention(module, attention_dtype)
        if self._is_on_gpu:
            torch.cuda.synchronize()

    def _make(self, group: Group, pages: Pages) -> Room:
        modules = [self._modules[name] for name in group.processed]
        # Modules keep a few tensors while they are open; those are in use and get their values at the end of the group.
        in_use = {id(tensor) for module in modules for tensor in module._parameters.values()}
        room = Room(_opened(modules, pages), [], [], [])
        for fill in group.fills:
            tensor = self._tensor(fill.parameter)
            part = part_of(tensor, fill.into)
            is_staged = fill.is_cast or id(tensor) in in_use
            into = _staging(fill.piece.shape, fill.sent_dtype, part.device) if is_staged else part
            stays = not is_staged and fill.parameter.rpartition(".")[0] not in group.processed
            room.targets.append(Target(fill.piece, into, stays=stays))
            room.parameters.append(part)
            room.wholes.append(tensor)
        return room

    def _tensor(self, name: str) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self._modules[module], leaf)
        return tensor


def _opened(modules: Sequence[nn.Module], pages: Pages) -> list[nn.Module]:
    """All of them, or none."""
    opened: list[nn.Module] = []
    try:
        for module in modules:
            opened.append(module)
            layers.open_module(module, pages)
    except BaseException:
        for module in opened:
            layers.put_back(module)
        raise
    return opened


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A part of a parameter, as plans name it: counted from where the parameter begins. Its values may be changed
    whatever autograd makes of the parameter."""
    return tensor.detach().as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)


def _staging(shape: Sequence[int], dtype: str, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
