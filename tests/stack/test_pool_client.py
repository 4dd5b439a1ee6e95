"""Purges and wipes on a real Mooncake master, by a client of its own under the engine's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake.store import MooncakeDistributedStore

from connectors.pool_client import PoolCallFailed, PoolClient
from connectors.vllm_plugin.pool_keys import epoch_prefix
from tests.stack.pool_fleet import LEASE_S, pool_of
from tests.stack.weights.volume import HOST, RunningVolume, running_volume

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]

JOB = "job-1.a"
PURGE_S = 30
NOT_OF_EPOCH_1 = ("job-1.a.11@", "job-1.a.2@", "job-1.a@", "job-1.a.1", "job-1xa.1@", "job-1.b.1@", "xjob-1.a.1@", "w/")
"""How keys begin that resemble those of JOB's epoch 1, or do not at all."""
PER_PREFIX = 3


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVolume]:
    with running_volume(tmp_path_factory.mktemp("pool"), capacity_bytes=64 << 20, lease_s=LEASE_S) as running:
        yield running


@pytest.fixture(scope="module")
def store(volume: RunningVolume) -> Iterator[Any]:
    store = MooncakeDistributedStore()
    assert store.setup(HOST, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", volume.volume.master) == 0
    yield store
    store.close()


@pytest.fixture
def pool(volume: RunningVolume, store: Any) -> PoolClient:
    """Of a pool that has keys of all kinds; all are leased, as those that somebody reads."""
    store.remove_all(True)
    for prefix in (epoch_prefix(JOB, 1), *NOT_OF_EPOCH_1):
        for number in range(PER_PREFIX):
            key = f"{prefix}model@tp_rank:0@{number}"
            assert store.put(key, b"kv") == 0
            assert store.is_exist(key) == 1
    return pool_of(volume)


def test_a20_a_purge_takes_one_epoch_of_one_job(pool: PoolClient) -> None:
    assert pool.count_keys(epoch_prefix(JOB, 1), PURGE_S) == PER_PREFIX
    assert pool.purge_epoch(JOB, 1, PURGE_S) == PER_PREFIX
    assert pool.count_keys(epoch_prefix(JOB, 1), PURGE_S) == 0
    assert pool.count_keys("", PURGE_S) == PER_PREFIX * len(NOT_OF_EPOCH_1)
    assert pool.purge_epoch(JOB, 1, PURGE_S) == 0


def test_a_master_that_is_not_the_jobs_own_is_believed_itself(pool: PoolClient) -> None:
    joined = PoolClient(python=pool.python, master_address=pool.master_address, metrics_url=None)
    assert joined.purge_epoch(JOB, 1, PURGE_S) == PER_PREFIX
    assert pool.count_keys("", PURGE_S) == PER_PREFIX * len(NOT_OF_EPOCH_1)
    with pytest.raises(PoolCallFailed, match="no known address"):
        joined.count_keys("", PURGE_S)


def test_how_much_of_it_is_used(pool: PoolClient) -> None:
    use = pool.use(PURGE_S)
    assert use.mounted_bytes == 64 << 20
    assert use.keys == PER_PREFIX * (len(NOT_OF_EPOCH_1) + 1)
    assert 0 < use.used_bytes < use.mounted_bytes
    gone = PoolClient(python=pool.python, master_address=f"{HOST}:1", metrics_url=f"http://{HOST}:1/metrics")
    with pytest.raises(PoolCallFailed, match="Connection refused"):
        gone.use(1)


def test_a_wipe_takes_everything(pool: PoolClient) -> None:
    assert pool.wipe(PURGE_S) == PER_PREFIX * (len(NOT_OF_EPOCH_1) + 1)
    assert pool.count_keys("", PURGE_S) == 0


def test_a31_what_a_master_does_not_confirm_is_not_believed(pool: PoolClient) -> None:
    gone = PoolClient(python=sys.executable, master_address=f"{HOST}:1", metrics_url=f"http://{HOST}:1/metrics")
    with pytest.raises(PoolCallFailed, match="did not end within 3 s"):
        gone.purge_epoch(JOB, 1, 3)
    uncounted = PoolClient(python=pool.python, master_address=pool.master_address, metrics_url=gone.metrics_url)
    with pytest.raises(PoolCallFailed, match="get_all_keys"):
        uncounted.purge_epoch(JOB, 1, PURGE_S)


def test_an_interpreter_without_mooncake_says_so(pool: PoolClient, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    without = PoolClient(python=str(bare), master_address=pool.master_address, metrics_url=pool.metrics_url)
    with pytest.raises(PoolCallFailed, match="No module named 'mooncake'"):
        without.wipe(PURGE_S)
