"""What this process holds of a set of weights: local shards of plain tensors and DTensors, as pieces of checkpoint
tensors.

Trainers publish holdings (`connectors/publisher/`), engines serve theirs to peers (`nixl/server.py`). Nothing is
gathered or copied: a holding is the shard itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from connectors.weights.tensors import ITEM_BYTES, Piece, TensorMeta


@dataclass(frozen=True, slots=True)
class Holding:
    """One piece that this process has in memory."""

    piece: Piece
    tensor: torch.Tensor
    """Has the piece's shape; any strides, any device. Shares the owner's memory."""


def dtype_name(dtype: torch.dtype) -> str:
    """As `TensorMeta` spells it."""
    return str(dtype).removeprefix("torch.")


def holdings(source: nn.Module | Mapping[str, torch.Tensor]) -> tuple[dict[str, TensorMeta], list[Holding]]:
    """All tensors by name, and what this rank holds of them; a rank without a part of some tensor has no holding of it.

    Of tensors that share all their memory (tied weights) the first name counts: a loader that ties them asks for no
    other.
    """
    named = _module_tensors(source) if isinstance(source, nn.Module) else source
    metas: dict[str, TensorMeta] = {}
    held: list[Holding] = []
    for name, tensor in _tied_once(named):
        if dtype_name(tensor.dtype) not in ITEM_BYTES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which no checkpoint has: leave it out, or cast it")
        metas[name] = TensorMeta(dtype_name(tensor.dtype), tuple(tensor.shape))
        held.extend(holding for holding in _shards(name, tensor) if holding.piece.count)
    return metas, held


def _module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers. Tied ones are told by identity, so also on a rank whose shard of them is
    empty."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tied = names - {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def _tied_once(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[tuple[object, ...]] = set()
    for name, tensor in named.items():
        local = _local(tensor)
        memory = (local.device, local.data_ptr(), tuple(local.shape), local.stride(), tuple(tensor.shape))
        # Empty shards all have the address 0: they say nothing.
        if local.numel() and memory in seen:
            continue
        seen.add(memory)
        yield name, tensor


def _shards(name: str, tensor: torch.Tensor) -> Iterator[Holding]:
    local = _local(tensor)
    if not isinstance(tensor, DTensor):
        yield Holding(Piece(name, tuple((0, size) for size in tensor.shape)), local)
        return
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{name}: placements {tensor.placements} are parts of a sum, not values: redistribute it first"
        )
    _refuse_interleaved(name, tensor)
    # What torch's distributed checkpoint asks, and only the arithmetic of placements: no communication.
    for chunk in tensor.__create_chunk_list__():
        box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        yield Holding(Piece(name, box), local)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _refuse_interleaved(name: str, tensor: DTensor) -> None:
    """A strided shard is one box only when the mesh dimensions that it strides over shard the same dimension after
    it."""
    placements = tensor.placements
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        later = [d for d in range(mesh_dim + 1, len(placements)) if placements[d].is_shard(placement.dim)]
        over = 1
        for dim in later:
            over *= tensor.device_mesh.size(dim)
        if over != placement.split_factor:
            raise ValueError(f"{name}: placements {placements} interleave this rank's rows, which is not one slice")
