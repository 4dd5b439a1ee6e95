"""What the load generators send."""

from __future__ import annotations

import json

from tests.benchmarks.workload import SIZES, completion_body, http_request, session_ids


def test_bodies_have_the_sizes_that_the_figures_are_named_after() -> None:
    lengths = {size.name: len(completion_body(size.token_ids)) for size in SIZES}
    assert 3_600 <= lengths["3k7"] <= 3_800
    assert 115_000 <= lengths["116k"] <= 117_000


def test_a_body_is_the_same_each_time() -> None:
    assert completion_body(500) == completion_body(500)
    assert len(json.loads(completion_body(500))["prompt"]) == 500


def test_a_request_names_its_session_and_length() -> None:
    head, body = http_request(b'{"prompt": "a"}', session_ids(2)[1]).split(b"\r\n\r\n")
    assert b"x-session-id: rollout-00000001" in head.split(b"\r\n")
    assert b"content-length: 15" in head.split(b"\r\n")
    assert body == b'{"prompt": "a"}'
