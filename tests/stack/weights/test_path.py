"""Weights by way of a directory: real files, written by real ranks, read in pieces."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from connectors.publisher.path import PathPublisher
from connectors.publisher.ranks import PublishError
from connectors.weights.filling import byte_vector
from connectors.weights.path import PathTransport
from connectors.weights.safetensors_files import INDEX, SINGLE
from connectors.weights.source import FetchError, Target
from connectors.weights.tensors import Piece
from tests.stack.weights.hanging_disk import hanging_disk
from tests.stack.weights.trainer_ranks import on_ranks, sharded_model, whole_weights

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
TIMEOUT_S = 30


def fetch_all(transport: Any, source: Any, pieces: list[Piece], dtypes: dict[str, torch.dtype]) -> list[torch.Tensor]:
    """One load of one group."""
    fetch = transport.open(source, lambda manifest: [pieces], timeout_s=TIMEOUT_S)
    try:
        targets = [Target(piece, torch.zeros(piece.shape, dtype=dtypes[piece.tensor])) for piece in pieces]
        fetch.fetch(0, targets)
        return [target.into for target in targets]
    finally:
        fetch.close()


def of_folder(folder: Path) -> dict[str, str]:
    return {"transport": "path", "version": folder.name, "path": str(folder)}


def whole_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    return [Piece(name, tuple((0, size) for size in tensor.shape)) for name, tensor in tensors.items()]


def assert_fetches(transport: Any, source: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Everything, whole."""
    pieces = whole_pieces(tensors)
    found = fetch_all(transport, source, pieces, {name: tensor.dtype for name, tensor in tensors.items()})
    for piece, values in zip(pieces, found, strict=True):
        assert torch.equal(values, tensors[piece.tensor]), piece.tensor


def some_box(chance: random.Random, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    starts = [chance.randrange(size) for size in shape]
    return tuple((start, chance.randint(start + 1, size)) for start, size in zip(starts, shape, strict=True))


MIXED = {
    "rows": torch.randn(700, 3000),
    "bf16": torch.randn(7, 33, 5).bfloat16(),
    "fp8": torch.randn(40, 16).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_any_box_into_any_strides(tmp_path: Path, layout: str) -> None:
    save_file(MIXED, tmp_path / SINGLE)
    transport, chance = PathTransport(), random.Random(7)
    for _ in range(20):
        pieces = [Piece(name, some_box(chance, tuple(t.shape))) for name, t in MIXED.items() if t.numel()]
        fetch = transport.open(of_folder(tmp_path), lambda manifest, pieces=pieces: [pieces], timeout_s=TIMEOUT_S)
        targets = []
        for piece in pieces:
            shape = piece.shape if layout == "contiguous" else piece.shape[::-1]
            room = torch.zeros(shape, dtype=MIXED[piece.tensor].dtype)
            targets.append(
                Target(piece, room if layout == "contiguous" else room.permute(tuple(reversed(range(room.dim())))))
            )
        moved = fetch.fetch(0, targets)
        fetch.close()
        assert moved.bytes == sum(target.into.nbytes for target in targets)
        for target in targets:
            box = tuple(slice(start, stop) for start, stop in target.piece.box)
            expected = MIXED[target.piece.tensor][box]
            assert torch.equal(byte_vector(target.into.contiguous()), byte_vector(expected.contiguous()))
    transport.close()


def publish_by_rank(rank: int, *, folder: Path, version: str, replicas: int, max_file_bytes: int) -> Any:
    publisher = PathPublisher(folder, model=None, keep=None, max_file_bytes=max_file_bytes)
    publication = publisher.publish(sharded_model(seed=3, replicas=replicas), version)
    publication.wait_done(0)
    return publication.source


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_shards_of_all_ranks_become_an_ordinary_checkpoint(tmp_path: Path, ranks: int, replicas: int) -> None:
    folder = tmp_path / "versions"
    arguments = {"folder": folder, "version": "step-1", "replicas": replicas, "max_file_bytes": 30_000}
    sources = on_ranks(ranks, publish_by_rank, arguments, tmp_path)
    assert all(source == of_folder(folder / "step-1") for source in sources)

    weights = whole_weights(seed=3)
    file_of = json.loads((folder / "step-1" / INDEX).read_text())["weight_map"]
    assert file_of.keys() == weights.keys()
    assert len(set(file_of.values())) > 1
    read: dict[str, torch.Tensor] = {}
    for name in set(file_of.values()):
        read |= load_file(folder / "step-1" / name)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    assert_fetches(PathTransport(), sources[0], weights)


def fail_on_rank_1(rank: int, *, folder: Path) -> str:
    weights = {"w": torch.ones(4)} if rank == 0 else {"w": torch.ones(4), "only here": torch.ones(2)}
    with pytest.raises(PublishError) as failure:
        PathPublisher(folder, model=None, keep=None).publish(weights, "1")
    return str(failure.value)


def test_a_version_that_one_rank_can_not_write_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    told = on_ranks(2, fail_on_rank_1, {"folder": folder}, tmp_path)
    assert told[0] == told[1]
    assert "rank 1: other names" in told[0]
    assert not (folder / "1").exists()


def publish_in_any_order(rank: int, *, folder: Path) -> None:
    names = ["a", "b", "c"]
    weights = {name: torch.full((1000,), float(ord(name))) for name in (reversed(names) if rank else names)}
    PathPublisher(folder, model=None, keep=None).publish(weights, "1")


def test_ranks_need_not_name_tensors_in_one_order(tmp_path: Path) -> None:
    on_ranks(2, publish_in_any_order, {"folder": tmp_path / "versions"}, tmp_path)
    read = load_file(tmp_path / "versions" / "1" / SINGLE)
    assert {name: tensor.unique().tolist() for name, tensor in read.items()} == {"a": [97.0], "b": [98.0], "c": [99.0]}


def test_what_a_failure_left_on_disk_goes(tmp_path: Path) -> None:
    publisher = PathPublisher(tmp_path / "versions", model=tmp_path / "model", keep=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").mkdir()
    with pytest.raises(PublishError, match="directory"):
        publisher.publish({"w": torch.ones(5)}, "1")
    assert list((tmp_path / "versions").iterdir()) == []


def test_a_version_is_published_once_and_older_ones_go(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    publisher = PathPublisher(tmp_path / "versions", model=model, keep=2)
    for version in ("a", "b", "c"):
        publisher.publish({"w": torch.full((5,), float(ord(version)))}, version)
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["b", "c"]
    assert (tmp_path / "versions" / "c" / "config.json").read_text() == "{}"
    with pytest.raises(PublishError, match="published once"):
        publisher.publish({"w": torch.ones(5)}, "c")
    with pytest.raises(PublishError, match="no name for a directory"):
        publisher.publish({"w": torch.ones(5)}, "../c")
    assert_fetches(PathTransport(), of_folder(tmp_path / "versions" / "c"), {"w": torch.full((5,), float(ord("c")))})


def test_what_is_not_whole_is_refused_with_the_reason(tmp_path: Path) -> None:
    transport, weights = PathTransport(), {"a": torch.randn(100), "b": torch.randn(50)}

    def refused(pattern: str) -> FetchError:
        with pytest.raises(FetchError, match=pattern) as failure:
            assert_fetches(transport, of_folder(tmp_path), weights)
        return failure.value

    refused("still being written")
    save_file({"a": weights["a"]}, tmp_path / "one.safetensors")
    save_file({"b": weights["b"]}, tmp_path / "two.safetensors")
    refused(f"neither {INDEX} nor {SINGLE}")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert refused("lack tensors").tensors == ("b",)
    index["weight_map"]["b"] = "three.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert refused("three.safetensors of the index is missing").tensors == ("b",)
    index["weight_map"]["b"] = "two.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert_fetches(transport, of_folder(tmp_path), weights)
    with (tmp_path / "two.safetensors").open("rb+") as file:
        file.truncate((tmp_path / "two.safetensors").stat().st_size - 1)
    refused("damaged, or still being written")
    (tmp_path / INDEX).write_text('{"weight_map": {"a"')
    refused("no index of weights")


def test_a_checkpoint_that_changes_under_the_reader_is_refused(tmp_path: Path) -> None:
    weights = {"a": torch.randn(100)}
    save_file(weights, tmp_path / SINGLE)
    (piece,) = whole_pieces(weights)
    fetch = PathTransport().open(of_folder(tmp_path), lambda manifest: [[piece]], timeout_s=TIMEOUT_S)
    with (tmp_path / SINGLE).open("rb+") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    with pytest.raises(FetchError, match="written to while it was read"):
        fetch.fetch(0, [Target(piece, torch.zeros(100))])
    fetch.close()


def test_a_read_that_was_given_up_keeps_its_files_until_it_comes_back(tmp_path: Path) -> None:
    weights = {"a": torch.randn(100)}
    save_file(weights, tmp_path / SINGLE)
    (piece,) = whole_pieces(weights)
    transport, target = PathTransport(), Target(piece, torch.zeros(100))
    fetch = transport.open(of_folder(tmp_path), lambda manifest: [[piece]], timeout_s=0.2)
    with hanging_disk() as come_back:
        with pytest.raises(FetchError, match="not done after"):
            fetch.fetch(0, [target])
        fetch.close()
        assert not transport.is_idle(0)
        # A file that takes a number which is free.
        (tmp_path / "other").write_bytes(bytes(10_000))
        with (tmp_path / "other").open("rb"):
            come_back()
            assert transport.is_idle(TIMEOUT_S)
    assert torch.equal(target.into, weights["a"])


def test_when_one_part_cannot_be_read_no_other_is_still_written(tmp_path: Path) -> None:
    weights = {"a": torch.randn(2, 1_000_000), "b": torch.randn(10)}
    save_file(weights, tmp_path / SINGLE)
    pieces = whole_pieces(weights)
    transport = PathTransport()
    fetch = transport.open(of_folder(tmp_path), lambda manifest: [pieces], timeout_s=TIMEOUT_S)
    with (tmp_path / SINGLE).open("rb+") as file:
        file.truncate(1000)
    targets = [Target(piece, torch.zeros(piece.shape)) for piece in pieces]
    with hanging_disk(delay_s=0.5), pytest.raises(FetchError, match="cut while it was read"):
        fetch.fetch(0, targets)
    before = targets[0].into.clone()
    threading.Event().wait(0.7)
    assert torch.equal(targets[0].into, before)
    fetch.close()
