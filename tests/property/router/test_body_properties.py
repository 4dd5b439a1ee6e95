"""Bodies and streams under arbitrary input."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.errors import RequestRefused
from router.core.split import FIELDS, Route, decode_body, parse_body, prefill_body, read_prefill_reply
from router.core.stream import StreamMerge

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples are not timed: a busy machine is no failure."""

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)

NAMES = st.text() | st.sampled_from(sorted({name for table in FIELDS.values() for name in table}))


@UNTIMED
@given(route=st.sampled_from(sorted(FIELDS)), body=st.dictionaries(NAMES, JSON_VALUES, max_size=8), handoff=JSON_VALUES)
def test_a06_both_legs_carry_the_clients_body_key_for_key(route: Route, body: dict[str, Any], handoff: Any) -> None:
    owned = {"request_id", "session_id", "return_headrace", "cache_salt"}
    sent = {key: value for key, value in body.items() if key not in owned}
    parsed = parse_body(json.dumps(sent).encode(), route=route, session_header=None, session_fields=("session_id",))
    dropped = {name for name, rule in FIELDS[route].items() if rule.decode.action == "drop"}
    expected = {key: value for key, value in sent.items() if key not in dropped}
    decode = json.loads(decode_body(parsed, json.dumps(handoff).encode(), salt="s"))
    if isinstance(sent.get("sampling_params"), dict) and route == "generate":
        del decode["sampling_params"], expected["sampling_params"]
    assert decode == expected | {"kv_transfer_params": handoff, "cache_salt": "s"}
    prefill = json.loads(prefill_body(parsed, salt="s"))
    assert {key: value for key, value in prefill.items() if key not in FIELDS[route]} == {
        key: value for key, value in sent.items() if key not in FIELDS[route]
    }
    assert prefill["stream"] is False


@UNTIMED
@given(route=st.sampled_from(sorted(FIELDS)), raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_a35_any_bytes_are_parsed_or_refused(route: Route, raw: bytes) -> None:
    try:
        parsed = parse_body(raw, route=route, session_header=None, session_fields=("session_id",))
    except RequestRefused:
        return
    assert isinstance(json.loads(raw), dict)
    assert parsed.size == len(raw)


LINES = st.lists(
    st.sampled_from(
        [b'data: {"x":1}\n', b"\n", b": ping\n", b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":9}}}\r\n']
    )
)


@UNTIMED
@given(lines=LINES, cuts=st.lists(st.integers(0, 400)))
def test_a07_a_stream_comes_out_the_same_however_it_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    prefill = read_prefill_reply(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 5}}}')
    source = b"".join(lines)
    places = sorted({0, len(source), *(cut for cut in cuts if cut < len(source))})
    merge = StreamMerge(prefill)
    pieces = [merge.feed(source[start:end]) for start, end in pairwise(places)]
    assert b"".join(pieces) + merge.flush() == source.replace(b":9}", b":5}")
