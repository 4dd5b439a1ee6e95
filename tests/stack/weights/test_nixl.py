"""Weights read by NIXL from real FSDP2 shards: M trainer ranks, N readers, each a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.publisher.nixl import NixlPublisher
from connectors.publisher.ranks import PublishError
from connectors.weights.holdings import holdings
from connectors.weights.nixl import server
from connectors.weights.nixl.client import release
from connectors.weights.nixl.transport import NixlTransport
from connectors.weights.source import FetchError, Target, numbered
from connectors.weights.tensors import ITEM_BYTES, Piece
from tests.stack.weights import fsdp_trainer, nixl_reader
from tests.stack.weights.programs import ENVIRONMENT, Program
from tests.stack.weights.trainer_ranks import on_ranks

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

WIDTH, LAYERS = 96, 3
LEASE_S = 2.0
TIMEOUT_S = 20.0
WAIT_S = 3600.0
"""Longer than any test: what ends before it was told to."""
TRAINER_PORT = 9100
SHARED, TCP = "tcp,self,sm", "tcp,self"
"""UCX's ways: with shared memory the reader alone moves the bytes, with TCP alone the producer has to take part."""

Start = Callable[..., Program]


def full(*values: Any) -> Any:
    """One of the cases that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.fixture
def started() -> Iterator[Start]:
    programs: list[Program] = []

    def start(body: Callable[..., None], *arguments: Any, **environment: str) -> Program:
        programs.append(Program(body, *arguments, environment=environment))
        return programs[-1]

    yield start
    for program in programs:
        program.stop()


def trainer(start: Start, ranks: int, *, replicas: int = 1, width: int = WIDTH, **environment: str) -> list[Program]:
    """Its ranks; rank 0 takes the orders."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(TRAINER_PORT), "WORLD_SIZE": str(ranks)}
    return [
        start(fsdp_trainer.run, width, LAYERS, replicas, LEASE_S, RANK=str(rank), **world, **environment)
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


def expected(rank: int, ranks: int, seed: int, width: int = WIDTH) -> tuple[str, int]:
    """Digest and bytes of what a reader gets."""
    full = fsdp_trainer.weights(width, LAYERS, seed)
    metas, _ = holdings(full)
    pieces: list[Piece] = [piece for group in nixl_reader.needed(metas, rank, ranks) for piece in group]
    parts = {p: full[p.tensor][tuple(slice(*ends) for ends in p.box)] for p in pieces}
    return nixl_reader.digest(parts), sum(p.count * ITEM_BYTES[metas[p.tensor].dtype] for p in pieces)


@pytest.mark.parametrize(("trainers", "generators"), [full(1, 1), (2, 1), (1, 2), full(4, 2), full(2, 4)])
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
            assert result["planned"] == (seed == 1)
        assert done(program, generators) == (generators, 0)


@pytest.mark.parametrize("kind", [full("passing"), "strided"])
def test_targets_need_neither_stay_nor_be_dense(started: Start, kind: str) -> None:
    program, (reader,) = trainer(started, 2)[0], readers(started, 1, kind)
    for seed in (1, 2):
        load(reader, publish(program, f"step-{seed}", seed))
        assert loaded(reader)["digest"] == expected(0, 1, seed)[0]
        assert done(program, 1) == (1, 0)


@pytest.mark.parametrize("generators", [full(1), 2, full(3)])
def test_replicas_of_hybrid_shards_give_the_same(started: Start, generators: int) -> None:
    program, group = trainer(started, 4, replicas=2, width=512)[0], readers(started, generators)
    source = publish(program, "step-1", 1)
    given: Counter[str] = Counter()
    for reader in group:
        load(reader, source)
    for rank, reader in enumerate(group):
        result = loaded(reader)
        assert (result["digest"], result["bytes"]) == expected(rank, generators, 1, width=512)
        given.update(result["by_producer"])
    assert len(given) == 4
    assert max(given.values()) <= 1.05 * min(given.values())


@pytest.mark.parametrize("ranks", [1, full(2)])
def test_two_engines_load_from_replicas_evenly_and_release_the_trainer(started: Start, ranks: int) -> None:
    """Told which of all generator ranks theirs are, as the control plane tells them."""
    program = trainer(started, 4, replicas=4, width=512)[0]
    engines = [readers(started, ranks) for _ in range(2)]
    for seed in (1, 2):
        source = publish(program, f"step-{seed}", seed)
        given: list[Counter[str]] = []
        for number, group in enumerate(engines):
            for reader in group:
                load(reader, numbered(source, first_reader=number * ranks, readers=2 * ranks))
        for group in engines:
            given.append(Counter())
            for rank, reader in enumerate(group):
                result = loaded(reader)
                assert result["digest"] == expected(rank, ranks, seed, width=512)[0]
                assert result["planned"] == (seed == 1)
                given[-1].update(result["by_producer"])
        assert not given[0].keys() & given[1].keys(), "each engine has its own half of the holders"
        total = given[0] + given[1]
        assert (len(total), max(total.values()) <= 1.05 * min(total.values())) == (4, True), total
        program.tell("wait", None, WAIT_S)
        release(source, TIMEOUT_S)
        assert program.hear("done") == (2 * ranks, 0)


def test_a_version_that_is_not_served_is_refused(started: Start) -> None:
    program, (reader,) = trainer(started, 1)[0], readers(started, 1)
    source = publish(program, "step-1", 1)
    load(reader, source | {"version": "step-0"})
    assert "step-1 is" in reader.hear("failed")
    assert done(program, 0) == (0, 0)
    load(reader, source)
    assert "none is" in reader.hear("failed")
    load(reader, publish(program, "step-2", 2))
    assert loaded(reader)["digest"] == expected(0, 1, 2)[0]


@pytest.mark.parametrize(("victim", "transports"), [(0, SHARED), full(0, TCP), full(1, SHARED), (1, TCP)])
def test_a_trainer_killed_during_a_read_fails_the_load_and_not_the_next(
    started: Start, victim: int, transports: str
) -> None:
    ranks, (reader,) = trainer(started, 2, UCX_TLS=transports), readers(started, 1, UCX_TLS=transports)
    load(reader, publish(ranks[0], "step-1", 1), pause_s=0.5)
    reader.hear("begun")
    ranks[victim].kill()
    reader.hear("failed", timeout_s=TIMEOUT_S)
    for rank in ranks:
        rank.kill()
    load(reader, publish(trainer(started, 2, UCX_TLS=transports)[0], "step-2", 2))
    assert loaded(reader)["digest"] == expected(0, 1, 2)[0]


@pytest.mark.parametrize("transports", [SHARED, full(TCP)])
def test_a_reader_killed_during_a_read_holds_the_trainer_up_for_its_lease_alone(
    started: Start, transports: str
) -> None:
    program = trainer(started, 2, UCX_TLS=transports)[0]
    dying, living = readers(started, 2, UCX_TLS=transports)
    source = publish(program, "step-1", 1)
    load(dying, source, pause_s=60)
    dying.hear("begun")
    dying.kill()
    load(living, source)
    assert loaded(living)["digest"] == expected(1, 2, 1)[0]
    assert done(program, 2) == (1, 1)
    load(living, publish(program, "step-2", 2))
    assert loaded(living)["digest"] == expected(1, 2, 2)[0]


@pytest.mark.full
def test_a_reader_that_slept_past_its_lease_does_not_believe_what_it_read(started: Start) -> None:
    program, (reader,) = trainer(started, 2)[0], readers(started, 1)
    load(reader, publish(program, "step-1", 1), pause_s=0.2)
    reader.hear("begun")
    reader.signal(signal.SIGSTOP)
    assert done(program, 1) == (0, 1)
    reader.signal(signal.SIGCONT)
    assert "worth nothing" in reader.hear("failed")
    load(reader, publish(program, "step-2", 2))
    assert loaded(reader)["digest"] == expected(0, 1, 2)[0]


@pytest.mark.full
def test_a_slow_reader_is_cut_off_when_the_trainer_waits_no_longer(started: Start) -> None:
    program, (reader,) = trainer(started, 1)[0], readers(started, 1)
    load(reader, publish(program, "step-1", 1), pause_s=LEASE_S)
    reader.hear("begun")
    assert done(program, 1, timeout_s=0.5) == (0, 1)
    assert "worth nothing" in reader.hear("failed")


@pytest.mark.full
def test_a_trainer_that_hangs_fails_the_load_within_the_time_allowed(started: Start) -> None:
    ranks, (reader,) = trainer(started, 2), readers(started, 1)
    source = publish(ranks[0], "step-1", 1)
    load(reader, source, pause_s=0.5, timeout_s=2)
    reader.hear("begun")
    for rank in ranks:
        rank.signal(signal.SIGSTOP)
    assert "producer" in reader.hear("failed", timeout_s=TIMEOUT_S)
    for rank in ranks:
        rank.signal(signal.SIGCONT)
    load(reader, source)
    assert loaded(reader)["digest"] == expected(0, 1, 1)[0]


def wait_late(rank: int) -> float:
    """Rank 0 has something else to do first, as telling many engines is."""
    os.environ.update(ENVIRONMENT)
    server.PEER_TIMEOUT_S = 0.2
    publication = NixlPublisher(host="127.0.0.1").publish({"w": torch.ones(4)}, "v1")
    began = time.monotonic()
    if rank == 0:
        time.sleep(2)
    publication.wait_done(0.1, readers=0)
    return time.monotonic() - began


def test_the_other_ranks_wait_for_rank_0_however_late_it_comes(tmp_path: Path) -> None:
    assert min(on_ranks(2, wait_late, {}, tmp_path)) >= 2


def close_early(rank: int) -> None:
    """Rank 0 is through before rank 1 has asked it."""
    os.environ.update(ENVIRONMENT)
    publisher = NixlPublisher(host="127.0.0.1")
    publication = publisher.publish({"w": torch.ones(4)}, "v1")
    if rank == 1:
        time.sleep(1)
    publication.wait_done(0.1, readers=0)
    publisher.close()


def test_rank_0_does_not_leave_before_the_others_were_told(tmp_path: Path) -> None:
    assert on_ranks(3, close_early, {}, tmp_path) == [None] * 3


def fail_on_rank_1(rank: int) -> list[str]:
    os.environ.update(ENVIRONMENT)
    failures = []
    for host in ("203.0.113.1", "0.0.0.0"):
        with pytest.raises(PublishError) as failure:
            NixlPublisher(host=host if rank else "127.0.0.1")
        failures.append(str(failure.value))
    publisher = NixlPublisher(host="127.0.0.1")
    for _ in range(2):
        with pytest.raises(PublishError) as failure:
            publisher.publish({"w": torch.ones(4, dtype=torch.bfloat16 if rank else torch.float32)}, "v1")
        failures.append(str(failure.value))
    publisher.publish({"w": torch.ones(4)}, "v1").wait_done(1, readers=0)
    publisher.close()
    return failures


def test_what_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    for failures in on_ranks(2, fail_on_rank_1, {}, tmp_path):
        assert all("rank 1" in failure for failure in failures)
        assert "every address" in failures[1]
        assert "bfloat16" in failures[2]
        assert failures[3] == failures[2]


def test_after_a_failure_nothing_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    weights = {"a": torch.ones(4), "b": torch.ones(4)}
    publisher = NixlPublisher(host="127.0.0.1")
    source = publisher.publish(weights, "v1").source
    groups = [[Piece("a", ((0, 4),))], [Piece("b", ((0, 4),))]]
    transport = NixlTransport(name="reader", rank=0, world_size=1)

    def load(into: torch.Tensor) -> list[str]:
        failures = []
        fetch = transport.open(source, lambda manifest: groups, timeout_s=TIMEOUT_S)
        for number, target in enumerate((Target(groups[0][0], into), Target(groups[1][0], torch.zeros(4)))):
            targets = [target]
            fetch.start(number, targets)
            try:
                fetch.fetch(number, targets)
            except FetchError as error:
                failures.append(str(error))
        fetch.close()
        return failures

    first, second = load(torch.zeros(4, device="meta"))
    assert first == second
    assert load(torch.zeros(4)) == []
    with pytest.raises(FetchError, match="no place for the 1 ranks"):
        transport.open({**source, "first_reader": 4, "readers": 4}, lambda manifest: groups, timeout_s=TIMEOUT_S)
    transport.close()
    publisher.close()
