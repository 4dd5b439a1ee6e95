"""A trainer for tests: ranks of FSDP2 on gloo that serve their shards by NIXL. Rank 0 takes the orders:

    publish version seed          new weights, served: answered by ("published", source)
    wait readers timeout_s        ("done", (confirmed, lost)) once every rank may overwrite; all do, with zeros

Weights are a function of the seed alone, so that readers know what to expect.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from connectors.publisher.nixl import NixlPublisher
from connectors.weights.holdings import holdings


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * width + 3, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def weights(width: int, layers: int, seed: int) -> dict[str, torch.Tensor]:
    """The full state dict of a seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        model = Model(width, layers)
        for parameter in model.parameters():
            parameter.normal_()
        model.steps.fill_(seed)  # type: ignore[union-attr,operator]
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def fill(model: nn.Module, values: dict[str, torch.Tensor] | None) -> None:
    """Write this rank's shards in place, as an optimizer does."""
    _, held = holdings(model)
    for holding in held:
        if values is None:
            holding.tensor.zero_()
        else:
            part = values[holding.piece.tensor][tuple(slice(*ends) for ends in holding.piece.box)]
            holding.tensor.copy_(part)


def run(pipe: Connection, width: int, layers: int, replicas: int, lease_s: float) -> None:
    """One rank; which one the environment says, as torchrun's does."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = Model(width, layers)
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model, mesh=mesh)
    publisher = NixlPublisher(host="127.0.0.1", lease_s=lease_s)
    publication = None
    while True:
        order: list[Any] = [pipe.recv() if rank == 0 else None]
        distributed.broadcast_object_list(order)
        match order[0]:
            case ("publish", version, seed):
                fill(model, weights(width, layers, seed))
                publication = publisher.publish(model, version)
                answer: Any = ("published", publication.source)
            case ("wait", readers, timeout_s):
                assert publication is not None
                publication.wait_done(timeout_s, readers)
                fill(model, None)
                distributed.barrier()
                ended = publication.readers
                answer = ("done", ended and (len(ended.confirmed), len(ended.lost)))
        if rank == 0:
            pipe.send(answer)
