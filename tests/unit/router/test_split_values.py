"""How many prompts a body has, found without reading them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.split.values import count_prompts, read_flag, read_number

TOKENS = st.lists(st.integers(0, 200_000), max_size=4)
TEXTS = st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"', "],[", '", "', "a]"])


def raw(value: Any, **layout: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, **layout).encode())


@given(
    prompts=st.lists(TEXTS | TOKENS, max_size=6),
    at_most=st.integers(1, 8),
    indent=st.none() | st.just(2),
    ascii_only=st.booleans(),
)
def test_prompts_are_counted_up_to_a_number(
    prompts: list[Any], at_most: int, indent: int | None, ascii_only: bool
) -> None:
    counted = count_prompts(raw(prompts, indent=indent, ensure_ascii=ascii_only), at_most=at_most)
    assert counted == min(len(prompts), at_most)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), ("[]", 1), ([1, 2], 1), ([], 0), (None, 0), ([[[1]], [[2]]], 2), (["a", None, {"b": 1}], 3), ([-1], 1)],
)
def test_whatever_the_prompt_is_it_is_counted(prompt: Any, count: int) -> None:
    assert count_prompts(raw(prompt), at_most=5) == count


@pytest.mark.parametrize("value", [[2], {"n": 2}, [], {}, [True]])
def test_lists_and_objects_are_no_numbers_and_no_flags(value: Any) -> None:
    assert read_number(raw(value)) is None
    assert not read_flag(raw(value))
