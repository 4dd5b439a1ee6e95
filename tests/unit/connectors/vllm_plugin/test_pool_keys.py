"""The names by which KV of an epoch is found in the pool, and no other's."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.vllm_plugin.pool_keys import begins_with, epoch_of, epoch_prefix, epoch_salt, job_prefix


@pytest.mark.parametrize("epoch", [0, 1, 12, 10**15])
@pytest.mark.parametrize("rest", ["", "x", "7.8", "a" * 40])
def test_a_salt_says_its_epoch(epoch: int, rest: str) -> None:
    assert epoch_of(epoch_salt(epoch, rest)) == epoch


@pytest.mark.parametrize("salt", [None, "", "x", "1", ".", "x1.a", "-1.a", "01.a", "1 .a", "\u0661.a", "9" * 20 + ".a"])
def test_any_other_salt_names_none(salt: str | None) -> None:
    assert epoch_of(salt) is None


@given(
    st.text("ab.-1(@", min_size=1, max_size=6),
    st.text("ab.-1(@", min_size=1, max_size=6),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_a_prefix_finds_its_own_keys_and_no_others(one: str, other: str, epoch: int, another: int) -> None:
    key = epoch_prefix(other, another) + "model@tp_rank:0@abc"
    found = re.match(begins_with(epoch_prefix(one, epoch)), key) is not None
    assert found is key.startswith(epoch_prefix(one, epoch))
    if "@" not in one + other:
        assert found is ((one, epoch) == (other, another))


def test_keys_without_an_epoch_are_no_epochs() -> None:
    assert not job_prefix("job").startswith(epoch_prefix("job", 1))
    assert not epoch_prefix("job", 1).startswith(job_prefix("job"))
