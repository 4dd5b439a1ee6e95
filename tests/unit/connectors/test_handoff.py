from __future__ import annotations

import json

import pytest

from connectors.handoff import PARAMS_FIELD, REMOTE_DECODE, handed_over


def test_a_prefill_engine_is_asked_to_keep_the_kv_for_another_engine() -> None:
    assert PARAMS_FIELD == "kv_transfer_params"
    assert json.loads(REMOTE_DECODE) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


@pytest.mark.parametrize("params", [b"", b"null", b"{}", b"[]", b"false"])
def test_a02_a_reply_can_hold_no_handoff(params: bytes) -> None:
    assert handed_over(params) is None


def test_a03_a_handoff_is_passed_on_byte_for_byte() -> None:
    params = b'{"remote_block_ids": [[1,2]],"invented":{"y":[1.50,null]}}'
    assert handed_over(params) == params
