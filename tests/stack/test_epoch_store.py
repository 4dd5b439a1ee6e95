"""Epochs in a real pool: what engines read and write of it while their epoch moves, and how one epoch is purged.

One fleet for all tests of this module. Each test begins in an epoch of its own.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from mooncake.store import MooncakeDistributedStore

from connectors.pool_client import PoolCallFailed, PoolClient
from connectors.vllm_plugin.pool_keys import epoch_prefix
from tests.fakes.tiny_model import make_tiny_model
from tests.stack.pool_fleet import BLOCK, JOB, Fleet, Member, eventually, running_fleet
from tests.stack.weights.engine_process import MODELS
from tests.stack.weights.volume import HOST

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

LENGTH = 480
BLOCKS = LENGTH // BLOCK
HITS = LENGTH - BLOCK
"""The last block is computed: something has to give the next token."""
PURGE_S = 30
ALL_RUN = 8
"""Requests that an engine of these tests computes at once."""
OTHER_JOBS = ("job-1.b.1", "job-1.a.11", "job-1.a1.1", "job-1xa.1", "other")
"""Key prefixes that resemble those of JOB's epoch 1, or do not at all."""


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


def running_requests(member: Member) -> int:
    return int(sum(s.value for s in member.engine.client._samples() if s.name == "vllm:num_requests_running"))


def start_long(fleet: Fleet, member: Member, prompt: list[int], tokens: int, salt: str = "s") -> Future[Any]:
    """A request that is being generated when this returns."""
    before = running_requests(member)
    future = fleet.in_background(member.request, prompt, salt=salt, max_tokens=tokens)
    eventually(lambda: running_requests(member) > before or future.done())
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
    kept = start_long(fleet, member, prompt_of(4), 1000)
    member.pause("keep")
    saved = fleet.keys(old)
    member.to_epoch(old + 1)
    member.resume()
    assert len(values(kept.result())) == 1000
    save(member, fleet, prompt_of(5))
    assert (fleet.keys(old), fleet.keys(old + 1)) == (saved, BLOCKS)


def test_a41_an_engine_without_an_epoch_neither_reads_nor_writes(fleet: Fleet) -> None:
    """One request waits while its engine is fenced, and runs before an epoch is confirmed again."""
    member, epoch = fleet.decode, fleet.decode.engine.epoch
    known = prompt_of(6)
    save(fleet.prefill, fleet, known)
    before = member.hits()
    running = [start_long(fleet, member, prompt_of(10 + index, 40), 1500, f"s{index}") for index in range(ALL_RUN)]
    late = fleet.in_background(member.request, known, max_tokens=1)
    eventually(lambda: len(member.engine.call("GET", "/fence").json()["open_requests"]) == ALL_RUN + 1)
    time.sleep(0.5)
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


def test_a20_a_reset_of_the_external_cache_stays_within_the_epoch(fleet: Fleet) -> None:
    member, old = fleet.prefill, fleet.prefill.engine.epoch
    save(member, fleet, prompt_of(9))
    new = fleet.next_epoch()
    save(member, fleet, prompt_of(9))
    elsewhere = fleet.all_keys() - BLOCKS
    member.forget()
    assert member.engine.call("POST", "/reset_prefix_cache?reset_external=true").json()["success"] is True
    assert (fleet.keys(old), fleet.keys(new), fleet.all_keys()) == (BLOCKS, 0, elsewhere)


def test_a20_a_purge_takes_one_epoch_of_one_job(fleet: Fleet) -> None:
    prompt = prompt_of(20)
    old = fleet.prefill.engine.epoch
    save(fleet.prefill, fleet, prompt)
    put_foreign(fleet, old)
    new = fleet.next_epoch()
    save(fleet.prefill, fleet, prompt)
    others = fleet.all_keys() - fleet.keys(old)
    # Looked up a moment ago, so these keys have a lease.
    assert fleet.pool.purge_epoch(JOB, old, PURGE_S) == BLOCKS
    assert (fleet.keys(old), fleet.keys(new), fleet.all_keys()) == (0, BLOCKS, others)
    assert fleet.decode.hits_of(prompt) == HITS
    assert fleet.pool.purge_epoch(JOB, old, PURGE_S) == 0


def put_foreign(fleet: Fleet, epoch: int) -> None:
    """Keys of other jobs, and one that is no KV."""
    store = MooncakeDistributedStore()
    assert store.setup(HOST, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", fleet.volume.volume.master) == 0
    near = [epoch_prefix(JOB, epoch)[:-1] + "0@", "x" + epoch_prefix(JOB, epoch), epoch_prefix("job-1xa", epoch)]
    for name in (*near, *OTHER_JOBS):
        assert store.put(f"{name}@model@tp_rank:0", b"kv") == 0
    store.close()


def test_a22_a_reader_in_the_middle_of_a_load_when_the_purge_comes_computes_again(fleet: Fleet) -> None:
    prompts = [prompt_of(seed) for seed in range(30, 34)]
    member, epoch = fleet.decode, fleet.decode.engine.epoch
    expected = []
    for prompt in prompts:
        save(fleet.prefill, fleet, prompt)
        expected.append(values(fleet.prefill.request(prompt)))
    before = member.hits()
    with fleet.stopped_storage():
        # The first is in the middle of its load, the others are about to begin theirs.
        reading = [fleet.in_background(member.request, prompt) for prompt in prompts]
        eventually(lambda: len(member.engine.call("GET", "/fence").json()["open_requests"]) == len(prompts))
        time.sleep(1)
        assert not any(future.done() for future in reading)
        assert fleet.pool.purge_epoch(JOB, epoch, PURGE_S) == len(prompts) * BLOCKS
    for future, wanted in zip(reading, expected, strict=True):
        assert values(future.result()) == pytest.approx(wanted, abs=1e-4)
    assert member.hits() - before < len(prompts) * HITS
    save(fleet.prefill, fleet, prompt_of(35))
    assert member.hits_of(prompt_of(35)) == HITS


def test_a41_a_restarted_engine_is_in_no_epoch(fleet: Fleet) -> None:
    """Its fence says 503; behind the fence the pool is closed as well, which only the fence's word opens."""
    assert fleet.prefill.engine.call("GET", "/fence").json()["epoch"] == fleet.prefill.engine.epoch


def test_a31_a_purge_of_a_master_that_does_not_answer_is_no_purge() -> None:
    gone = PoolClient(python=sys.executable, master_address=f"{HOST}:1", metrics_url=f"http://{HOST}:1/metrics")
    with pytest.raises(PoolCallFailed, match=":1"):
        gone.purge_epoch(JOB, 1, PURGE_S)
    with pytest.raises(PoolCallFailed, match="in 1 s"):
        gone.wipe(0.01)


def test_a_wipe_takes_everything(fleet: Fleet) -> None:
    save(fleet.prefill, fleet, prompt_of(40))
    present = fleet.all_keys()
    assert fleet.pool.wipe(PURGE_S) == present > 0
    assert fleet.all_keys() == 0
