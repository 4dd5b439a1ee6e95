"""One rank of the benchmark's trainer: random weights of a shape, published as asked. Answers `talker.py`'s questions.

With RANK and WORLD_SIZE in its environment it is one of several ranks, which hold row shards as FSDP2 makes them.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from connectors.publisher.nixl import NixlPublisher
from connectors.publisher.path import PathPublisher
from connectors.publisher.publisher import Publication, Publisher
from connectors.publisher.store import StorePublisher
from connectors.weights.store_client import Volume
from tests.benchmarks.weights.shapes import SHAPES, Shape
from tests.benchmarks.weights.talker import answer_questions, own_output

HOST = "127.0.0.1"
IN_HOST = "nixl_host"
"""NIXL from a copy of the weights in the trainer's host memory."""


class Trainer:
    def __init__(self, shape: Shape, device: str, folder: Path) -> None:
        self._folder = folder
        self._shape = shape
        self._weights = _random_weights(shape, device)
        self._in_host: dict[str, torch.Tensor] = {}
        """A copy of the weights in host memory, pinned where there is a GPU: what a trainer that offloads has."""
        self._publishers: dict[str, Publisher] = {}
        self._publication: Publication | None = None
        self._plain: Any = None

    def publish(self, transport: str, version: str, master: str = "") -> Mapping[str, Any]:
        if transport not in self._publishers:
            self._publishers[transport] = self._publisher(transport, master)
        weights = self._copy_in_host() if transport == IN_HOST else self._weights
        self._publication = self._publishers[transport].publish(weights, version)
        return self._publication.source

    def reseed(self, seed: int) -> None:
        """Other weights, the same ones for the same seed."""
        torch.manual_seed(seed)
        for tensor in self._weights.values():
            _randomize(tensor, self._shape)

    def done(self, readers: int) -> None:
        assert self._publication is not None
        self._publication.wait_done(60.0, readers=readers)

    def offer_plainly(self, transport: str) -> Mapping[str, Any]:
        """The same number of bytes in one piece, for one large NIXL read."""
        from nixl._api import nixl_agent, nixl_agent_config

        nbytes = sum(tensor.nbytes for tensor in self._weights.values())
        if transport == IN_HOST:
            memory = torch.ones(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        else:
            memory = torch.ones(nbytes, dtype=torch.uint8, device=next(iter(self._weights.values())).device)
        agent = nixl_agent("plain-producer", nixl_agent_config())
        agent.register_memory([memory])
        self._plain = (agent, memory)
        return {
            "agent": base64.b64encode(agent.get_agent_metadata()).decode(),
            "address": memory.data_ptr(),
            "nbytes": nbytes,
            "memory": "VRAM" if memory.is_cuda else "DRAM",
            "device": memory.get_device() if memory.is_cuda else 0,
        }

    def withdraw(self) -> None:
        self._plain = None

    def _copy_in_host(self) -> dict[str, torch.Tensor]:
        if not self._in_host:
            pinned = torch.cuda.is_available()
            self._in_host = {
                name: torch.empty_like(tensor, device="cpu", pin_memory=pinned)
                for name, tensor in self._weights.items()
            }
        for name, tensor in self._weights.items():
            self._in_host[name].copy_(tensor)
        return self._in_host

    def _publisher(self, transport: str, master: str) -> Publisher:
        if transport in ("nixl", IN_HOST):
            return NixlPublisher(host=HOST)
        if transport == "path":
            return PathPublisher(self._folder / "versions", model=self._folder / "model", keep=1)
        volume = Volume(master=master, protocol="tcp", host=HOST, devices=(), lend_bytes=0)
        return StorePublisher(volume, job="bench", keep=1)


def _random_weights(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    whole = {
        name: _randomize(torch.empty(size, dtype=torch.bfloat16, device=device), shape)
        for name, size in shape.tensors().items()
    }
    if ranks == 1:
        return whole
    mesh = init_device_mesh(device, (ranks,))
    return {name: distribute_tensor(whole.pop(name), mesh, [Shard(0)]) for name in list(whole)}


def _randomize(tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    scale = shape.hidden**-0.5
    return tensor.uniform_(-scale, scale)


def main() -> None:
    replies = own_output()
    shape, device, folder = SHAPES[sys.argv[1]], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    trainer = Trainer(shape, device, folder)
    names = ("publish", "reseed", "done", "offer_plainly", "withdraw")
    answer_questions({name: getattr(trainer, name) for name in names}, replies)


if __name__ == "__main__":
    main()
