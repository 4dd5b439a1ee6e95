"""Weights read by NIXL from real FSDP2 shards: M trainer ranks, N readers, each a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connectors.weights.holdings import holdings
from connectors.weights.tensors import ITEM_BYTES, Piece
from tests.stack.weights import fsdp_trainer, nixl_reader
from tests.stack.weights.programs import Program

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

WIDTH, LAYERS = 96, 3
LEASE_S = 2.0
TIMEOUT_S = 20.0
TRAINER_PORT = 22100

Start = Callable[..., Program]


@pytest.fixture
def started() -> Iterator[Start]:
    programs: list[Program] = []

    def start(body: Callable[..., None], *arguments: Any, **environment: str) -> Program:
        programs.append(Program(body, *arguments, environment=environment))
        return programs[-1]

    yield start
    for program in programs:
        program.stop()


def trainer(start: Start, ranks: int, *, replicas: int = 1, layers: int = LAYERS, **environment: str) -> list[Program]:
    """Its ranks; rank 0 takes the orders."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(TRAINER_PORT), "WORLD_SIZE": str(ranks)}
    return [
        start(fsdp_trainer.run, WIDTH, layers, replicas, LEASE_S, RANK=str(rank), **world, **environment)
        for rank in range(ranks)
    ]


def readers(start: Start, count: int, kind: str = "dense", **environment: str) -> list[Program]:
    return [start(nixl_reader.run, rank, count, kind, **environment) for rank in range(count)]


def publish(program: Program, version: str, seed: int) -> Any:
    program.tell("publish", version, seed)
    return program.hear("published")


def load(program: Program, source: Any, *, pause_s: float = 0.0, timeout_s: float = TIMEOUT_S) -> None:
    program.tell("load", source, pause_s, timeout_s)


def loaded(program: Program) -> Any:
    program.hear("begun")
    return program.hear("loaded")


def done(program: Program, readers: int, timeout_s: float = 60) -> Any:
    """(readers that confirmed, readers that were lost), once all ranks have overwritten their weights."""
    program.tell("wait", readers, timeout_s)
    return program.hear("done")


def expected(rank: int, ranks: int, seed: int, layers: int = LAYERS) -> tuple[str, int]:
    """Digest and bytes of what a reader gets."""
    full = fsdp_trainer.weights(WIDTH, layers, seed)
    metas, _ = holdings(full)
    pieces: list[Piece] = [piece for group in nixl_reader.needed(metas, rank, ranks) for piece in group]
    parts = {p: full[p.tensor][tuple(slice(*ends) for ends in p.box)] for p in pieces}
    return nixl_reader.digest(parts), sum(p.count * ITEM_BYTES[metas[p.tensor].dtype] for p in pieces)


@pytest.mark.parametrize(("trainers", "generators"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_every_reader_gets_its_slices_byte_for_byte(started: Start, trainers: int, generators: int) -> None:
    program, group = trainer(started, trainers)[0], readers(started, generators)
    for seed in (1, 2, 3):
        source = publish(program, f"step-{seed}", seed)
        for reader in group:
            load(reader, source)
        for rank, reader in enumerate(group):
            result = loaded(reader)
            assert (result["digest"], result["bytes"]) == expected(rank, generators, seed)
            assert len(result["by_producer"]) == trainers
        assert done(program, generators) == (generators, 0)
