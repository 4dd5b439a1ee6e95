"""The view of the pool from one epoch, over a store that is a dict: what transfers, look-ups and resets see of it."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from connectors.vllm_plugin.epoch_view import NOT_FOUND, EpochView, OutsideEpoch

KEYS = ["job@model@tp_rank:0@aa", "job@model@tp_rank:0@bb"]


class Store:
    """Has a value for each key, as Mooncake's client has."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.values) for key in keys]

    def batch_put_from_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any, config: Any) -> list[int]:
        self.values.update(dict.fromkeys(keys, config))
        return [0] * len(keys)

    def batch_get_into_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any) -> list[int]:
        return [1 if key in self.values else NOT_FOUND for key in keys]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, str]:
        return {key: self.values[key] for key in keys if key in self.values}

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        found = [key for key in self.values if re.match(pattern, key)]
        for key in found:
            del self.values[key]
        return len(found)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def view(store: Store) -> EpochView:
    return EpochView(store, "job")


def save(view: EpochView, epoch: int | None) -> None:
    """As vLLM's sending thread: only what is not there yet."""
    with view.transfer(epoch, saves=True):
        missing = [key for key, found in zip(KEYS, view.batch_is_exist(KEYS), strict=True) if not found]
        if missing:
            view.batch_put_from_multi_buffers(missing, [], [], "kv")


def load(view: EpochView, epoch: int | None) -> list[int]:
    with view.transfer(epoch, saves=False):
        return view.batch_get_into_multi_buffers(KEYS, [], [])


def test_an_epoch_sees_its_own_keys(view: EpochView, store: Store) -> None:
    view.move(1)
    save(view, 1)
    assert list(store.values) == ["job.1@model@tp_rank:0@aa", "job.1@model@tp_rank:0@bb"]
    assert view.batch_is_exist(KEYS) == [1, 1]
    assert load(view, 1) == [1, 1]
    assert view.batch_get_replica_desc(KEYS) == dict.fromkeys(KEYS, "kv")
    view.move(2)
    assert view.batch_is_exist(KEYS) == [0, 0]
    assert load(view, 2) == [NOT_FOUND] * 2
    assert view.batch_get_replica_desc(KEYS) == {}


@pytest.mark.parametrize("engine", [None, 2])
@pytest.mark.parametrize("request_epoch", [None, 1])
def test_a_request_of_another_epoch_leaves_and_finds_nothing(
    view: EpochView, store: Store, engine: int | None, request_epoch: int | None
) -> None:
    view.move(1)
    save(view, 1)
    before = dict(store.values)
    view.move(engine)
    save(view, request_epoch)
    assert load(view, request_epoch) == [NOT_FOUND] * 2
    assert store.values == before


def test_without_an_epoch_nothing_is_seen(view: EpochView, store: Store) -> None:
    view.move(1)
    save(view, 1)
    view.move(None)
    assert view.batch_is_exist(KEYS) == [0, 0]
    assert view.batch_get_replica_desc(KEYS) == {}
    assert view.remove_all(True) == 0
    assert len(store.values) == 2
    with pytest.raises(OutsideEpoch):
        view.batch_put_from_multi_buffers(KEYS, [], [], "kv")


def test_a26_a_save_keeps_to_the_epoch_that_it_began_in(view: EpochView, store: Store) -> None:
    view.move(1)
    with view.transfer(1, saves=True):
        assert view.batch_is_exist(KEYS) == [0, 0]
        view.move(2)
        view.batch_put_from_multi_buffers(KEYS, [], [], "kv")
    assert {key.partition("@")[0] for key in store.values} == {"job.1"}


def test_threads_do_not_share_a_transfer(view: EpochView) -> None:
    view.move(1)
    seen: list[list[int]] = []
    save(view, 1)
    with view.transfer(2, saves=False):
        thread = threading.Thread(target=lambda: seen.append(view.batch_is_exist(KEYS)))
        thread.start()
        thread.join()
        assert view.batch_is_exist(KEYS) == [0, 0]
    assert seen == [[1, 1]]


def test_a20_a_reset_removes_the_epochs_keys_alone(view: EpochView, store: Store) -> None:
    for epoch in (1, 2):
        view.move(epoch)
        save(view, epoch)
    store.values["another.2@model"] = "kv"
    assert view.remove_all(True) == 2
    assert sorted(store.values) == [
        "another.2@model",
        "job.1@model@tp_rank:0@aa",
        "job.1@model@tp_rank:0@bb",
    ]
