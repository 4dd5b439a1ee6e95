"""An engine whose store connector is vLLM's own, from the job file: an update wipes its pool while it is paused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.harness import CALL_TIMEOUT_S, Headrace, job_table, wait_until
from tests.fleet.expected import SAME, expected, weight_sets
from tests.fleet.traffic import difference, logprobs

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(600)]

NAME = "stock-store"
ROUTER_PORT = 9437
STORE = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"load_async": True},
}


@pytest.fixture(scope="module")
def job(headrace: Headrace) -> Iterator[dict[str, Any]]:
    table = job_table(
        NAME,
        weight_sets()[0],
        ROUTER_PORT,
        kv_offload={"type": "mooncake", "cpu": {"num_bytes": 64 << 20}},
        roles={"colocated": {}},
        monitoring={"enabled": False},
        weights={"limits": {"grace": 2}},
    )
    table["engine"] |= {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "kv_transfer_config": STORE}
    try:
        yield headrace.up(table)
    finally:
        headrace.down(NAME)


def keys(job: dict[str, Any]) -> list[str]:
    url = str(job["pool"]["metrics_url"]).replace("/metrics", "/get_all_keys")
    return httpx.get(url, timeout=30, trust_env=False).text.split()


def test_a24_the_pool_is_empty_when_the_new_weights_serve(headrace: Headrace, job: dict[str, Any]) -> None:
    assert difference(expected(0), logprobs(job)) < SAME
    wait_until("the engine saves to the pool", lambda: keys(job) != [])
    pushed = headrace.run(
        "weights", "push", NAME, str(weight_sets()[1]), "--version", "step-1", timeout_s=CALL_TIMEOUT_S
    )
    assert pushed.returncode == 0, pushed.stderr
    assert keys(job) == []
    assert difference(expected(1), logprobs(job)) < SAME
    wait_until("the engine saves to the pool again", lambda: keys(job) != [])


def test_rolling_is_refused_by_name(headrace: Headrace, job: dict[str, Any]) -> None:
    command = ("weights", "push", NAME, str(weight_sets()[0]), "--version", "step-2", "--strategy", "rolling")
    refused = headrace.run(*command, timeout_s=60)
    assert (refused.returncode, "kv_transfer_config" in refused.stderr) == (4, True)
