"""An engine of two ranks moves between epochs as a whole: each rank has keys of its own, and a look-up needs both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from connectors.pool_client import PoolClient
from connectors.vllm_plugin.pool_keys import epoch_prefix
from tests.fakes.tiny_model import make_tiny_model
from tests.stack.pool_fleet import BLOCK, JOB, LEASE_S, Member, eventually, pool_of, start_member
from tests.stack.weights.engine_process import MODELS, wait_ready
from tests.stack.weights.volume import running_volume

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(300)]

RANKS = 2
LENGTH = 256
KEYS = RANKS * LENGTH // BLOCK
COUNT_S = 30


@dataclass
class Running:
    member: Member
    pool: PoolClient

    def has_all_keys(self, epoch: int) -> bool:
        return self.pool.count_keys(epoch_prefix(JOB, epoch), COUNT_S) == KEYS


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    model = make_tiny_model(MODELS / "tiny-qwen3")
    with running_volume(folder, capacity_bytes=64 << 20, lease_s=LEASE_S) as volume:
        member = start_member(model, folder, volume, "colocated", "0|1", ranks=RANKS)
        try:
            wait_ready(member.engine)
            yield Running(member, pool_of(volume))
        finally:
            member.engine.stop()


def test_all_ranks_follow(running: Running) -> None:
    member = running.member
    prompt = random.Random(1).choices(range(250), k=LENGTH)
    for epoch in (1, 2):
        member.to_epoch(epoch)
        assert member.hits_of(prompt) == 0
        eventually(partial(running.has_all_keys, epoch))
        assert member.hits_of(prompt) == LENGTH - BLOCK
    assert running.pool.purge_epoch(JOB, 1, COUNT_S) == KEYS
    assert member.hits_of(prompt) == LENGTH - BLOCK
