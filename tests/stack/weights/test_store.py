"""Weights by way of a Mooncake volume: real masters and storage clients, objects put by real ranks, read in pieces."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.publisher.ranks import PublishError
from connectors.publisher.store import StorePublisher
from connectors.weights.source import FetchError, Target
from connectors.weights.store import StoreTransport
from connectors.weights.store_client import StoreClient, Volume
from connectors.weights.tensors import Piece
from tests.stack.weights.test_path import TIMEOUT_S, assert_fetches, fetch_all, some_box, whole_pieces
from tests.stack.weights.trainer_ranks import on_ranks, sharded_model, whole_weights
from tests.stack.weights.volume import RunningVolume, running_volume

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

CAPACITY = 256 << 20
LEASE_S = 2.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVolume]:
    with running_volume(tmp_path_factory.mktemp("weights"), capacity_bytes=CAPACITY, lease_s=LEASE_S) as volume:
        yield volume


@pytest.fixture
def volume(running: RunningVolume) -> Volume:
    return running.volume


@pytest.fixture
def transport() -> Iterator[StoreTransport]:
    transport = StoreTransport()
    yield transport
    transport.close()


def numbered(value: float, rows: int = 1000) -> dict[str, torch.Tensor]:
    return {"a": torch.full((rows, 64), float(value)), "b": torch.full((7,), float(value))}


def publish_by_rank(rank: int, *, volume: Volume, job: str, replicas: int) -> Any:
    publisher = StorePublisher(volume, job=job, keep=1)
    publication = publisher.publish(sharded_model(seed=3, replicas=replicas), "step-1")
    publication.wait_done(0)
    publisher.close()
    return publication.source


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_shards_of_all_ranks_are_read_whole_and_in_parts(
    tmp_path: Path, volume: Volume, transport: StoreTransport, ranks: int, replicas: int
) -> None:
    arguments = {"volume": volume, "job": f"fsdp-{ranks}", "replicas": replicas}
    sources = on_ranks(ranks, publish_by_rank, arguments, tmp_path)
    assert all(source == sources[0] for source in sources)
    weights = whole_weights(seed=3)
    assert_fetches(transport, sources[0], weights)
    chance = random.Random(5)
    pieces = [Piece(name, some_box(chance, tuple(tensor.shape))) for name, tensor in weights.items() for _ in range(8)]
    found = fetch_all(transport, sources[0], pieces, {name: tensor.dtype for name, tensor in weights.items()})
    for piece, values in zip(pieces, found, strict=True):
        assert torch.equal(values, weights[piece.tensor][tuple(slice(*ends) for ends in piece.box)]), piece


def test_tensors_of_any_layout_and_size(volume: Volume, transport: StoreTransport) -> None:
    weights = {
        "longer than an object": torch.randn(5000, 4096),
        "transposed": torch.randn(300, 200).t(),
        "bf16": torch.randn(33, 5).bfloat16(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
    }
    publisher = StorePublisher(volume, job="any", keep=1)
    assert_fetches(transport, publisher.publish(weights, "1").source, weights)
    publisher.close()


def test_memory_that_stays_is_filled_again_by_each_load(volume: Volume, transport: StoreTransport) -> None:
    publisher = StorePublisher(volume, job="stays", keep=1)
    pieces = whole_pieces(numbered(0))
    targets = [Target(piece, torch.zeros(piece.shape), stays=True) for piece in pieces]
    for value in (1.0, 2.0, 3.0):
        publication = publisher.publish(numbered(value), f"{value}")
        fetch = transport.open(publication.source, lambda manifest: [pieces[:1], pieces[1:]], timeout_s=TIMEOUT_S)
        fetch.fetch(0, targets[:1])
        fetch.fetch(1, targets[1:])
        fetch.close()
        assert all(bool((target.into == value).all()) for target in targets)
    publisher.close()


def test_old_versions_go_when_nobody_reads_them(volume: Volume, transport: StoreTransport) -> None:
    publisher = StorePublisher(volume, job="old.ones", keep=2)
    neighbour = StorePublisher(volume, job="oldXones", keep=1)
    others = neighbour.publish(numbered(-1), "other job").source
    sources = {"1": publisher.publish(numbered(1), "1").source}
    pieces = whole_pieces(numbered(0))
    reading = transport.open(sources["1"], lambda manifest: [pieces], timeout_s=TIMEOUT_S)
    sources |= {name: publisher.publish(numbered(float(name)), name).source for name in ("2", "3")}

    targets = [Target(piece, torch.zeros(piece.shape)) for piece in pieces]
    reading.fetch(0, targets)
    assert all(bool((target.into == 1).all()) for target in targets), "its leases kept it"
    reading.close()

    # Looking whether leases have ended would renew them.
    threading.Event().wait(1.5 * LEASE_S)
    sources["4"] = publisher.publish(numbered(4), "4").source
    for gone in ("1", "2"):
        with pytest.raises(FetchError, match="no such object"):
            assert_fetches(transport, sources[gone], numbered(float(gone)))
    for kept in ("3", "4"):
        assert_fetches(transport, sources[kept], numbered(float(kept)))
    assert_fetches(transport, others, numbered(-1))
    publisher.close()
    neighbour.close()


def test_what_is_removed_by_force_is_never_taken_for_weights(volume: Volume, transport: StoreTransport) -> None:
    publisher, client = StorePublisher(volume, job="forced", keep=1), StoreClient(volume)
    source = publisher.publish(numbered(1), "1").source
    pieces = whole_pieces(numbered(0))
    fetch = transport.open(source, lambda manifest: [pieces[:1], pieces[1:]], timeout_s=TIMEOUT_S)
    fetch.fetch(0, [Target(pieces[0], torch.zeros(pieces[0].shape))])
    client.remove_matching("^forced/.*/0/", even_if_read=True)
    with pytest.raises(FetchError, match="no such object|removed"):
        fetch.fetch(1, [Target(pieces[1], torch.zeros(pieces[1].shape))])
    fetch.close()
    with pytest.raises(FetchError, match="was removed from the volume"):
        assert_fetches(transport, source, numbered(1))
    publisher.close()
    client.close()


def test_the_pools_reset_and_eviction_leave_weights_alone(
    tmp_path: Path, volume: Volume, transport: StoreTransport
) -> None:
    publisher, filler = StorePublisher(volume, job="safe", keep=1), StoreClient(volume)
    source = publisher.publish(numbered(1), "1").source
    with running_volume(tmp_path, capacity_bytes=64 << 20, lease_s=LEASE_S) as pool:
        engine = StoreClient(pool.volume)
        engine.put_text("kv", b"block")
        # What vLLM's external reset calls.
        assert engine.mooncake.remove_all(True) == 1
        engine.close()
    # More than the volume holds: others' objects, which are not pinned, give way to each other.
    block = bytes(8 << 20)
    for number in range(2 * CAPACITY // len(block)):
        filler.mooncake.put(f"not-weights/{number}", block)
    assert_fetches(transport, source, numbered(1))
    filler.remove_matching("^not-weights/", even_if_read=True)
    publisher.close()
    filler.close()


def test_a_version_that_does_not_fit_leaves_nothing_behind(volume: Volume, transport: StoreTransport) -> None:
    publisher = StorePublisher(volume, job="full", keep=1)
    kept = publisher.publish(numbered(1), "1").source
    with pytest.raises(PublishError, match="no room left"):
        publisher.publish({"a": torch.zeros(CAPACITY // 4 + 1)}, "2")
    publisher.publish({"a": torch.zeros(CAPACITY // 8)}, "3")
    with pytest.raises(FetchError, match="no such object"):
        assert_fetches(transport, kept, numbered(1))
    publisher.close()


@pytest.mark.full
def test_a_storage_client_that_hangs_or_dies_is_an_error_in_time(tmp_path: Path, transport: StoreTransport) -> None:
    with running_volume(tmp_path, capacity_bytes=64 << 20, lease_s=LEASE_S) as own:
        publisher = StorePublisher(own.volume, job="hangs", keep=1)
        weights = numbered(1, rows=20_000)
        source = publisher.publish(weights, "1").source
        pieces = whole_pieces(weights)

        def load(timeout_s: float) -> None:
            fetch = transport.open(source, lambda manifest: [pieces], timeout_s=timeout_s)
            try:
                fetch.fetch(0, [Target(piece, torch.zeros(piece.shape)) for piece in pieces])
            finally:
                fetch.close()

        os.kill(own.client.pid, signal.SIGSTOP)
        with pytest.raises(FetchError, match="not done after"):
            load(1.0)
        with pytest.raises(FetchError, match="earlier read has not come back"):
            load(1.0)
        os.kill(own.client.pid, signal.SIGCONT)
        load(TIMEOUT_S)
        os.kill(own.client.pid, signal.SIGKILL)
        own.client.popen.wait()
        with pytest.raises(FetchError, match="transfer failed|no such object|removed"):
            load(TIMEOUT_S)
        publisher.close()
