"""M trainer ranks over gloo on this machine: a small module sharded by FSDP2, and a function run on every rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

JOIN_S = 120.0


class Block(nn.Module):
    """Rows that ranks don't divide evenly, a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 101)
        self.down = nn.Linear(101, 48, bias=False)
        self.norm = nn.LayerNorm(48)


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(48, 97, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.5))


def small_model(seed: int) -> SmallModel:
    torch.manual_seed(seed)
    return SmallModel()


def whole_weights(seed: int) -> dict[str, torch.Tensor]:
    """What the ranks together hold, tied weights once."""
    tensors = small_model(seed).state_dict()
    del tensors["head.weight"]
    return tensors


def sharded_model(seed: int, replicas: int = 1) -> nn.Module:
    """On each rank: FSDP2 shards; with several replicas each group of ranks holds all of them (hybrid sharding)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = distributed.get_world_size()
    shape, names = ((size,), ("shard",)) if replicas == 1 else ((replicas, size // replicas), ("replica", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = small_model(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def on_ranks(count: int, work: Callable[..., Any], arguments: Mapping[str, Any], folder: Path) -> list[Any]:
    """What `work(rank, **arguments)` returns on each of `count` ranks; it must be importable."""
    # Ranks are forked from one process that has imported torch, and nothing more.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", __name__])
    results = context.Queue()
    meeting = folder / f"meeting-{count}-{len(list(folder.iterdir()))}"
    processes = [
        context.Process(target=_rank, args=(rank, count, meeting, work, dict(arguments), results), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=JOIN_S) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    failed = {rank: value for rank, value in found.items() if isinstance(value, BaseException)}
    assert not failed, failed
    return [found[rank] for rank in range(count)]


def _rank(
    rank: int, count: int, meeting: Path, work: Callable[..., Any], arguments: dict[str, Any], results: Any
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=count)
    try:
        results.put((rank, work(rank, **arguments)))
    except Exception as error:
        results.put((rank, RuntimeError(repr(error))))
    finally:
        distributed.destroy_process_group()
