from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.vllm_plugin.pool_keys import epoch_of
from router.core.epochs import Epochs, Salter


def test_versions_in_the_order_of_their_epochs() -> None:
    epochs = Epochs()
    for number, version in ((3, "b"), (1, "a"), (4, "a")):
        epochs.commit(number, version)
    assert epochs.newest(9) == {1: "a", 3: "b", 4: "a"}
    assert epochs.newest(2) == {3: "b", 4: "a"}
    assert [epochs.version_of(number) for number in (1, 3, 9)] == ["a", "b", ""]
    assert [epochs.first_with(version) for version in ("a", "b", "c")] == [1, 3, None]


def test_saying_it_again_changes_nothing() -> None:
    epochs = Epochs()
    epochs.commit(1, "a")
    epochs.commit(1, "other")
    assert epochs.version_of(1) == "a"


def test_a_version_that_was_given_up_counts_no_more_until_it_comes_again() -> None:
    epochs = Epochs()
    for number, version, committed in ((1, "a", None), (2, "b", 1), (3, "a", 1)):
        epochs.commit(number, version, committed=committed)
    assert [epochs.first_with(version) for version in ("a", "b")] == [1, None]
    assert epochs.version_of(2) == "b", "replies may still be made from it"
    epochs.commit(4, "b", committed=3)
    assert epochs.first_with("b") == 4


def test_only_old_epochs_are_forgotten() -> None:
    epochs = Epochs()
    for number in range(20_100):
        epochs.commit(number, f"v{number}")
    known = epochs.newest(30_000)
    assert len(known) < 20_100
    assert sorted(known) == list(range(min(known), 20_100))
    assert epochs.first_with("v20000") == 20_000
    assert (epochs.version_of(0), epochs.first_with("v0")) == ("", None)


SALTER = Salter(b"the job's secret")
CLIENT_SALTS = st.none() | st.text(min_size=1, max_size=128)


@given(epoch=st.integers(0, 2**63), salt=CLIENT_SALTS)
def test_a_salt_fits_the_engines_and_tells_its_epoch_alone(epoch: int, salt: str | None) -> None:
    made = SALTER.salt(epoch, salt)
    assert 1 <= len(made) <= 128
    assert re.fullmatch("[0-9]+[.][0-9a-f]{40}", made)
    assert epoch_of(made) == epoch
    assert b"the job's secret".hex() not in made


@given(one=st.tuples(st.integers(0, 3), CLIENT_SALTS), other=st.tuples(st.integers(0, 3), CLIENT_SALTS))
def test_salts_are_equal_if_and_only_if_epoch_and_client_salt_are(
    one: tuple[int, str | None], other: tuple[int, str | None]
) -> None:
    assert (SALTER.salt(*one) == SALTER.salt(*other)) is (one == other)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_nobody_without_the_secret_can_name_a_salt(salt: str | None) -> None:
    assert Salter(b"another secret").salt(1, salt) != SALTER.salt(1, salt)
    assert Salter(b"the job's secret").salt(1, salt) == SALTER.salt(1, salt)


def test_text_that_is_no_unicode_has_a_salt_too() -> None:
    assert SALTER.salt(1, "\ud800") != SALTER.salt(1, "\ud801")


@pytest.mark.parametrize(("one", "other"), [((1, "2"), (12, None)), ((1, "1 s a"), (11, "a")), ((1, ""), (1, None))])
def test_no_client_salt_can_pass_for_another_epoch(one: tuple[int, str | None], other: tuple[int, str | None]) -> None:
    assert SALTER.salt(*one) != SALTER.salt(*other)
