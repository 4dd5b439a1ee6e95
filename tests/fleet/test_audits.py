"""Audits of a real job: requests that its router keeps, a probe where it keeps none, and a block in its pool that gets
other bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.harness import Headrace
from tests.fleet.audits import ONE_BLOCK, PROMPT, ask_from_pool, audit, key_of_new_block, pool_client
from tests.fleet.control import Control
from tests.fleet.job import NAME

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def test_where_no_request_was_kept_it_probes(job: dict[str, Any], headrace: Headrace) -> None:
    code, found = audit(headrace, NAME)
    (probe,) = found["audited"]
    assert (code, found["outcome"], probe["kind"]) == (0, "agrees", "probe"), found
    assert probe["cached_tokens"] > 0


def test_a_request_that_came_from_the_pool(job: dict[str, Any], headrace: Headrace) -> None:
    ask_from_pool(job, PROMPT, "first")
    ask_from_pool(job, PROMPT, "second")
    code, found = audit(headrace, NAME)
    (kept,) = found["audited"]
    assert (code, found["outcome"], kept["kind"]) == (0, "agrees", "request"), found
    assert kept["cached_tokens"] > 0
    assert kept["judgement"]["compared"] > 1


def test_requests_of_an_epoch_that_has_gone_are_passed_over(
    job: dict[str, Any], control: Control, headrace: Headrace
) -> None:
    control.update()
    code, found = audit(headrace, NAME)
    kept, probe = found["audited"]
    assert "has gone" in kept["skipped"]
    assert (code, probe["kind"], found["outcome"]) == (0, "probe", "agrees"), found


def test_kv_of_older_weights_is_found(job: dict[str, Any], control: Control, headrace: Headrace) -> None:
    """A block that was computed under the weights before lies where one of these weights is looked for."""
    with pool_client(job) as pool:
        old = pool.get(key_of_new_block(job, control.served()[1], "third"))
        control.update()
        key = key_of_new_block(job, control.served()[1], "fourth")
        assert pool.upsert(key, old) == 0
    ask_from_pool(job, ONE_BLOCK, "fifth")
    code, found = audit(headrace, NAME)
    (kept,) = found["audited"]
    assert (code, kept["finding"], kept["keys"]) == (1, "stale or corrupt KV", [key]), found
    assert kept["judgement"]["off_by"] > 10 * kept["judgement"]["allowed"]
