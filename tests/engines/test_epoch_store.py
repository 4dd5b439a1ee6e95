"""Epochs in a real pool: what engines read and write of it while their epoch moves, and how one epoch is purged.

One fleet for all tests of this module. Each test begins in an epoch of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from tests.fakes.tiny_model import make_tiny_model
from tests.stack.pool_fleet import AT_ONCE, BLOCK, HANDOFF_LEASE_S, JOB, Fleet, Member, eventually, running_fleet
from tests.stack.weights.engine_process import MODELS

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

LENGTH = 480
BLOCKS = LENGTH // BLOCK
HITS = LENGTH - BLOCK
"""The last block is computed: something has to give the next token."""
PURGE_S = 30
FAILED_KEYS = "vllm:mooncake_store_operation_failed_keys_total"
LONG = 2000
"""Tokens that take long enough for an epoch to move meanwhile."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(make_tiny_model(MODELS / "tiny-qwen3"), tmp_path_factory.mktemp("epochs")) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Fleet:
    running.next_epoch()
    return running


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(250), k=length)


def save(member: Member, fleet: Fleet, prompt: list[int], salt: str = "s") -> None:
    """Compute a prompt and wait until the pool has it."""
    epoch = member.engine.epoch
    wanted = fleet.keys(epoch) + len(prompt) // BLOCK
    assert member.request(prompt, salt=salt, max_tokens=1).status_code == 200
    eventually(lambda: fleet.keys(epoch) == wanted)


def values(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    found: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def start_long(fleet: Fleet, member: Member, prompt: list[int], tokens: int, salt: str = "s") -> Future[Any]:
    """A request that is being generated when this returns."""
    before = member.gauge("vllm:num_requests_running")
    future = fleet.in_background(member.request, prompt, salt=salt, max_tokens=tokens)
    eventually(lambda: member.gauge("vllm:num_requests_running") > before or future.done())
    assert not future.done()
    return future


def test_a21_engines_of_one_epoch_share_what_either_has_computed(fleet: Fleet) -> None:
    prompt, other = prompt_of(1), prompt_of(2)
    save(fleet.prefill, fleet, prompt)
    assert fleet.decode.hits_of(prompt) == HITS
    save(fleet.decode, fleet, other)
    assert fleet.prefill.hits_of(other) == HITS
    assert fleet.keys(fleet.prefill.engine.epoch) == 2 * BLOCKS


def test_a24_no_hit_across_epochs_even_with_an_equal_salt(fleet: Fleet) -> None:
    prompt = prompt_of(3)
    save(fleet.prefill, fleet, prompt)
    old = fleet.prefill.engine.epoch
    new = fleet.next_epoch()
    for member in fleet.members:
        assert member.hits_of(prompt, epoch=old) == 0
        assert fleet.keys(new) == 0, "a request of another epoch has no part in this one"
    save(fleet.decode, fleet, prompt)
    assert (fleet.keys(old), fleet.keys(new)) == (BLOCKS, BLOCKS)
    assert fleet.prefill.hits_of(prompt) == HITS


def test_a26_what_is_generated_after_the_move_is_never_saved(fleet: Fleet) -> None:
    member, old = fleet.decode, fleet.decode.engine.epoch
    kept = start_long(fleet, member, prompt_of(4), LONG)
    member.pause("keep")
    saved = fleet.keys(old)
    member.to_epoch(old + 1)
    member.resume()
    assert len(values(kept.result())) == LONG
    save(member, fleet, prompt_of(5))
    assert (fleet.keys(old), fleet.keys(old + 1)) == (saved, BLOCKS)


def test_a41_an_engine_without_an_epoch_neither_reads_nor_writes(fleet: Fleet) -> None:
    """One request waits while its engine is fenced, and runs before an epoch is confirmed again."""
    member, epoch = fleet.decode, fleet.decode.engine.epoch
    known = prompt_of(6)
    save(fleet.prefill, fleet, known)
    before = member.hits()
    running = [start_long(fleet, member, prompt_of(10 + index, BLOCK), LONG, f"s{index}") for index in range(AT_ONCE)]
    late = fleet.in_background(member.request, known, max_tokens=1)
    eventually(lambda: member.gauge("vllm:num_requests_waiting") == 1)
    member.pause("keep")
    member.withdraw_epoch()
    saved = fleet.all_keys()
    member.resume()
    assert late.result().status_code == 200
    assert all(future.result().status_code == 200 for future in running)
    assert (member.hits(), fleet.all_keys()) == (before, saved)
    member.to_epoch(epoch + 1)


def test_a26_a_save_that_is_under_way_when_the_epoch_moves_stays_out_of_the_new_one(fleet: Fleet) -> None:
    member, old = fleet.prefill, fleet.prefill.engine.epoch
    with fleet.stopped_storage():
        assert member.request(prompt_of(7), max_tokens=1).status_code == 200
        assert member.request(prompt_of(8), max_tokens=1).status_code == 200
        member.to_epoch(old + 1)
    # A pause is answered when all saves have ended.
    member.pause("abort")
    member.resume()
    assert fleet.keys(old + 1) == 0
    save(member, fleet, prompt_of(7))
    assert fleet.keys(old + 1) == BLOCKS


def test_a_pause_gives_up_handoffs_that_nobody_is_going_to_read(fleet: Fleet) -> None:
    engine = fleet.prefill.engine
    handed = fleet.prefill.request(prompt_of(40), max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert handed.json()["kv_transfer_params"]["remote_block_ids"]
    # Else it would be answered after the lease, and the client would have lost its patience.
    engine.client.pause(engine.instance, engine.next_order(), HANDOFF_LEASE_S / 2, drops_handoffs=True)
    engine.resume()


def test_a20_a_reset_of_the_external_cache_stays_within_the_epoch(fleet: Fleet) -> None:
    member, old = fleet.prefill, fleet.prefill.engine.epoch
    save(member, fleet, prompt_of(9))
    new = fleet.next_epoch()
    save(member, fleet, prompt_of(9))
    elsewhere = fleet.all_keys() - BLOCKS
    member.forget()
    assert member.engine.call("POST", "/reset_prefix_cache?reset_external=true").json()["success"] is True
    assert (fleet.keys(old), fleet.keys(new), fleet.all_keys()) == (BLOCKS, 0, elsewhere)


def test_a24_a_purge_of_the_old_epoch_leaves_the_new_one(fleet: Fleet) -> None:
    prompt = prompt_of(20)
    old = fleet.prefill.engine.epoch
    save(fleet.prefill, fleet, prompt)
    assert fleet.decode.hits_of(prompt) == HITS
    new = fleet.next_epoch()
    save(fleet.prefill, fleet, prompt)
    others = fleet.all_keys() - fleet.keys(old)
    # Read a moment ago, so these keys have a lease.
    assert fleet.pool.purge_epoch(JOB, old, PURGE_S) == BLOCKS
    assert (fleet.keys(old), fleet.keys(new), fleet.all_keys()) == (0, BLOCKS, others)
    assert fleet.decode.hits_of(prompt) == HITS


def test_a22_a_reader_in_the_middle_of_a_load_when_the_purge_comes_computes_again(fleet: Fleet) -> None:
    prompts = [prompt_of(seed) for seed in range(30, 34)]
    member, epoch = fleet.decode, fleet.decode.engine.epoch
    expected = []
    for prompt in prompts:
        save(fleet.prefill, fleet, prompt)
        expected.append(values(fleet.prefill.request(prompt)))
    before = member.gauge(FAILED_KEYS)
    with fleet.stopped_storage():
        # The first is in the middle of its load, the others are about to begin theirs.
        reading = [fleet.in_background(member.request, prompt) for prompt in prompts]
        eventually(lambda: len(member.engine.call("GET", "/fence").json()["open_requests"]) == len(prompts))
        time.sleep(2)
        assert not any(future.done() for future in reading)
        assert fleet.pool.purge_epoch(JOB, epoch, PURGE_S) == len(prompts) * BLOCKS
    for future, wanted in zip(reading, expected, strict=True):
        assert values(future.result()) == pytest.approx(wanted, abs=1e-4)
    save(fleet.prefill, fleet, prompt_of(35))
    assert member.hits_of(prompt_of(35)) == HITS
    assert member.gauge(FAILED_KEYS) > before
