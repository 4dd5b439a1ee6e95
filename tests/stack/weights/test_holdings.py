"""What ranks of real FSDP2, hybrid sharded and tensor parallel models hold: all of it together, each what it says."""

from __future__ import annotations

from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from connectors.weights.holdings import holdings
from connectors.weights.tensors import Piece, TensorMeta
from tests.stack.weights.programs import Program

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

RANKS = 4
PORT = 9150
KINDS = ("sharded", "hybrid", "tensor_parallel", "columns", "interleaved", "partial")


class Model(nn.Module):
    """Sizes that no number of ranks divides, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 3)
        self.tied = nn.Linear(7, 10, bias=False)
        self.tied.weight = self.up.weight
        self.register_buffer("steps", torch.ones(2))


def sharded(kind: str) -> nn.Module | dict[str, torch.Tensor]:
    model = Model()
    flat = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    match kind:
        case "sharded":
            fully_shard(model, mesh=flat)
        case "hybrid":
            fully_shard(model, mesh=square)
        case "tensor_parallel":
            parallelize_module(model, square["two"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=square["one"])
        case "columns":
            full = Model().state_dict()
            return {
                name: DTensor.from_local(tensor, square, [Replicate(), Replicate()]).redistribute(
                    square, [Replicate(), Shard(tensor.dim() - 1)]
                )
                for name, tensor in full.items()
                if name != "tied.weight"
            }
        case "partial":
            return {"w": DTensor.from_local(torch.ones(4, 3), flat, [Partial()])}
        case "interleaved":
            placements = [Replicate(), _StridedShard(0, split_factor=2)]
            local = torch.zeros(2, 3)
            return {"w": DTensor.from_local(local, square, placements, run_check=False, shape=(4, 3), stride=(3, 1))}
    return model


def run(pipe: Connection) -> None:
    """One rank: what it holds of each kind of model."""
    distributed.init_process_group("gloo")
    while True:
        kind = pipe.recv()[1]
        try:
            metas, held = holdings(sharded(kind))
        except ValueError as error:
            pipe.send(("refused", str(error)))
            continue
        pipe.send(("held", (metas, [(holding.piece, holding.tensor.contiguous()) for holding in held])))


@pytest.fixture(scope="module")
def said() -> dict[str, list[Any]]:
    """By kind what each rank said."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(RANKS)}
    programs = [Program(run, environment={**world, "RANK": str(rank)}) for rank in range(RANKS)]
    answers: dict[str, list[Any]] = {}
    for kind in KINDS:
        for program in programs:
            program.tell("hold", kind)
        answers[kind] = [program.hear("held", "refused") for program in programs]
    for program in programs:
        program.stop()
    return answers


@pytest.mark.parametrize("kind", ["sharded", "hybrid", "tensor_parallel", "columns"])
def test_ranks_hold_what_they_say_and_together_everything(said: dict[str, list[Any]], kind: str) -> None:
    full = Model().state_dict()
    covered: Counter[str] = Counter()
    boxes: set[Piece] = set()
    for metas, held in said[kind]:
        assert {name: TensorMeta("float32", tuple(full[name].shape)) for name in metas} == metas
        for piece, tensor in held:
            assert torch.equal(tensor, full[piece.tensor][tuple(slice(*ends) for ends in piece.box)])
            covered.update({piece.tensor: 0 if piece in boxes else piece.count})
            boxes.add(piece)
    assert covered == {name: tensor.numel() for name, tensor in full.items() if name in said[kind][0][0]}


def test_a_tied_weight_is_there_once(said: dict[str, list[Any]]) -> None:
    for metas, _ in said["sharded"]:
        assert sorted(metas) == ["down.bias", "down.weight", "steps", "up.bias", "up.weight"]


def test_rows_that_interleave_are_refused(said: dict[str, list[Any]]) -> None:
    assert all("interleave" in answer for answer in said["interleaved"])


def test_sums_that_are_not_summed_up_are_refused(said: dict[str, list[Any]]) -> None:
    assert all("parts of a sum" in answer for answer in said["partial"])


def test_a_dtype_of_no_checkpoint_is_named() -> None:
    with pytest.raises(ValueError, match=r"phases has dtype torch.complex64"):
        holdings({"phases": torch.zeros(2, dtype=torch.complex64)})


def test_plain_tensors_and_views_that_share_memory() -> None:
    weight = torch.arange(12.0).view(3, 4)
    metas, held = holdings({"a": weight, "b": weight, "t": weight.t(), "empty": torch.empty(0, 4)})
    assert list(metas) == ["a", "t", "empty"]
    assert [(holding.piece, holding.tensor.data_ptr()) for holding in held] == [
        (Piece("a", ((0, 3), (0, 4))), weight.data_ptr()),
        (Piece("t", ((0, 4), (0, 3))), weight.data_ptr()),
    ]
