"""Choices, bodies and streams under arbitrary input."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.errors import RequestRefused
from router.core.fleet import Fleet
from router.core.load import LoadIndex
from router.core.split import FIELDS, Route, decode_body, parse_body, prefill_body, read_prefill_reply
from router.core.stream import StreamMerge
from router.settings import RouterSettings

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


def make_fleet(replicas: int) -> Fleet:
    engines = [{"name": f"d{number}", "role": "decode", "url": f"http://d{number}"} for number in range(replicas)]
    values: dict[str, Any] = {"job": "t", "host": "h", "port": 1, "internal_host": "h", "internal_port": 2}
    fleet = Fleet(RouterSettings.model_validate(values | {"engines": engines, "handoff_lease_s": 30.0}))
    for engine in engines:
        fleet.probe_passed(engine["name"])
    return fleet


@UNTIMED
@given(
    replicas=st.integers(1, 7),
    sessions=st.integers(1, 40),
    absent=st.lists(st.tuples(st.integers(0, 39), st.booleans())),
)
def test_a11_new_sessions_are_even_within_1_among_replicas_present_throughout(
    replicas: int, sessions: int, absent: list[tuple[int, bool]]
) -> None:
    fleet, chosen = make_fleet(replicas + 1), Counter({f"d{number}": 0 for number in range(1, replicas + 1)})
    for number in range(sessions):
        for at, up in absent:
            if at == number and up:
                fleet.probe_passed("d0")
            elif at == number:
                fleet.leg_failed("d0", "unreachable")
        session = fleet.begin_request(f"s{number}")
        leg = fleet.place(session, "decode", tokens=5)
        assert leg is not None
        chosen[leg.replica] += 1
        fleet.release(leg)
        fleet.end_request(session, 0.0)
    steady = [count for name, count in chosen.items() if name != "d0"]
    assert max(steady) - min(steady) <= 1


CHANGES = st.tuples(
    st.sampled_from("abcd"), st.sampled_from(["sessions", "tokens", "chosen", "in", "out"]), st.integers(0, 3)
)


@UNTIMED
@given(changes=st.lists(CHANGES, max_size=60), avoid=st.frozensets(st.sampled_from("abcd")))
def test_the_index_finds_what_a_scan_finds(changes: list[tuple[str, str, int]], avoid: frozenset[str]) -> None:
    index = LoadIndex("abcd")
    for name, what, amount in changes:
        if what == "sessions":
            index.change(name, sessions=amount)
        elif what == "tokens":
            index.change(name, tokens=amount)
        elif what == "chosen":
            index.mark_chosen(name)
        else:
            index.set_present(name, what == "in")
        present = [load for load in index.in_order() if load.present and load.name not in avoid]
        best = min(present, key=lambda load: (load.sessions, load.tokens, load.chosen, load.order), default=None)
        assert index.least_loaded(avoid) == (best.name if best is not None else None)


@UNTIMED
@given(route=st.sampled_from(sorted(FIELDS)), body=st.dictionaries(NAMES, JSON_VALUES, max_size=8), handoff=JSON_VALUES)
def test_a06_both_legs_carry_the_clients_body_key_for_key(route: Route, body: dict[str, Any], handoff: Any) -> None:
    owned = {"request_id", "session_id", "return_headrace", "cache_salt"}
    sent = {key: value for key, value in body.items() if key not in owned}
    parsed = parse_body(json.dumps(sent).encode(), route=route, session_header=None, session_fields=("session_id",))
    dropped = {name for name, rule in FIELDS[route].items() if rule.decode.action == "drop"}
    expected = {key: value for key, value in sent.items() if key not in dropped}
    decode = json.loads(decode_body(parsed, json.dumps(handoff).encode(), salt=None))
    if isinstance(sent.get("sampling_params"), dict) and route == "generate":
        del decode["sampling_params"], expected["sampling_params"]
    assert decode == expected | {"kv_transfer_params": handoff}
    prefill = json.loads(prefill_body(parsed, salt=None))
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
    assert parsed.raw == raw


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
