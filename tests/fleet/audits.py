"""Audits of a real job: requests that its router keeps, and a block in its pool that gets other bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from connectors.mooncake import TCP_ENVIRONMENT
from tests.e2e.harness import Headrace, clear_local_cache, complete, engine_url, job_token, wait_until
from tests.fleet.job import PREFILL

BUFFER_BYTES = 32 << 20
PROMPT = [(5 * column + column * column) % 250 for column in range(200)]
ONE_BLOCK = [(11 * column + 3) % 250 for column in range(40)]
"""With its completion it fills one block, so that it has one key in the pool."""
NEW_TOKENS = 12


def ask_from_pool(job: dict[str, Any], prompt: list[int], session: str) -> None:
    """A request that the router keeps, and whose prompt comes from the pool as far as that has it."""
    for name in PREFILL:
        clear_local_cache(engine_url(job, name), job_token(job))
    complete(job["router"]["url"], prompt, NEW_TOKENS, session)


def key_of_new_block(job: dict[str, Any], epoch: int, session: str) -> str:
    """Where the pool has the block of `ONE_BLOCK`, which is asked for the first time in this epoch."""
    before = pool_keys(job, epoch)
    ask_from_pool(job, ONE_BLOCK, session)
    wait_until("the block is saved", lambda: len(pool_keys(job, epoch) - before) == 1)
    (key,) = pool_keys(job, epoch) - before
    return key


def pool_keys(job: dict[str, Any], epoch: int) -> set[str]:
    url = str(job["pool"]["metrics_url"]).replace("/metrics", "/get_all_keys")
    prefix = f"{job['pool']['cache_prefix']}.{epoch}@"
    return {key for key in httpx.get(url, timeout=30, trust_env=False).text.split() if key.startswith(prefix)}


def audit(headrace: Headrace, name: str) -> tuple[int, Any]:
    """Exit code and what was said, of the newest request alone."""
    done = headrace.run("audit", name, "--requests", "1", "--json", timeout_s=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def pool_client(job: dict[str, Any]) -> Iterator[Any]:
    """Mooncake's own client of the job's pool."""
    for name, value in TCP_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", job["pool"]["master_address"]) == 0
    try:
        yield store
    finally:
        store.close()
