"""Long lists are carried past the decoder, and what comes out is what a decoder would have made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.split import decode_body, parse_body
from router.core.split.numbers import CUT, WORTH_CUTTING, cut_numbers

LONG = st.lists(st.integers(10**5, 10**6), min_size=WORTH_CUTTING // 5, max_size=WORTH_CUTTING // 4)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.text()
    | st.sampled_from(['"prompt": [1]', '"prompt', "]", '\\"prompt\\": ['])
    | LONG,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "x"]), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    before=VALUES,
    prompt=LONG | VALUES,
    after=VALUES,
    indent=st.none() | st.just(1),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n")]),
)
def test_a_body_with_and_without_the_short_cut(
    before: Any, prompt: Any, after: Any, indent: int | None, separators: tuple[str, str]
) -> None:
    client = {"before": before, "prompt": prompt, "after": after}
    raw = json.dumps(client, indent=indent, separators=separators).encode()
    body = parse_body(raw, route="completions", session_header=None, session_fields=())
    assert json.loads(decode_body(body, None, salt="s")) == client | {"cache_salt": "s"}


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": [1, 2]}',
        b'{"b": [%b]}' % (b"1, " * 900),
        b'{"a": ["%b"]}' % (b"1, " * 900),
        b'{"a": [[%b]]}' % (b"1, " * 900),
        b'{"a": "[%b]"}' % (b"1, " * 900),
        b'{"a": [%b' % (b"1, " * 900),
        b"",
    ],
)
def test_what_is_no_long_list_of_numbers_is_left_in_place(text: bytes) -> None:
    assert cut_numbers(text, b'"a"') == (text, None)


def test_the_list_is_cut_out_as_it_is() -> None:
    numbers = b"[ %b2]" % (b"1 ,\n" * 900)
    rest, cut = cut_numbers(b'{"b": 1, "a"\n:%b, "c": []}' % numbers, b'"a"')
    assert cut is not None
    assert (rest, bytes(cut)) == (b'{"b": 1, "a"\n:%b, "c": []}' % CUT, numbers)
