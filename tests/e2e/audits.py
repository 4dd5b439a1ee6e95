"""Audits of a real job: requests that its router keeps, and blocks in its pool that hold other blocks' KV."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from connectors.mooncake import TCP_ENVIRONMENT
from tests.e2e.harness import Headrace, clear_local_cache, complete, engine_url, job_token

BUFFER_BYTES = 32 << 20
PROMPT = [(5 * column + column * column) % 250 for column in range(200)]
NEW_TOKENS = 12


def ask_from_pool(job: dict[str, Any], session: str) -> None:
    """A request that the router keeps, and whose prompt comes from the pool as far as that has it."""
    clear_local_cache(engine_url(job, "prefill-0"), job_token(job))
    complete(job["router"]["url"], PROMPT, NEW_TOKENS, session)


def audit(headrace: Headrace, name: str) -> tuple[int, Any]:
    """Exit code and what was said, of the newest request alone."""
    done = headrace.run("audit", name, "--requests", "1", "--json", timeout_s=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def pool_keys(job: dict[str, Any], epoch: int) -> list[str]:
    url = str(job["pool"]["metrics_url"]).replace("/metrics", "/get_all_keys")
    prefix = f"{job['pool']['cache_prefix']}.{epoch}@"
    return [key for key in httpx.get(url, timeout=30, trust_env=False).text.split() if key.startswith(prefix)]


def exchange_blocks(job: dict[str, Any], keys: Sequence[str]) -> None:
    """Each key gets the bytes of the one before it."""
    with _pool(job) as store:
        blocks = [store.get(key) for key in keys]
        assert all(blocks)
        for key, block in zip(keys, blocks[-1:] + blocks[:-1], strict=True):
            assert store.upsert(key, block) == 0


@contextmanager
def _pool(job: dict[str, Any]) -> Iterator[Any]:
    for name, value in TCP_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", job["pool"]["master_address"]) == 0
    try:
        yield store
    finally:
        store.close()
