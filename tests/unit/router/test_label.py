from __future__ import annotations

import json
from typing import Any

from router.core.asks import Grant
from router.core.label import Making


def grant(role: Any, replica: str, epoch: int = 5, version: str = "v5", reason: Any = "new") -> Grant:
    return Grant(
        ticket=1,
        serial=1,
        role=role,
        replica=replica,
        url="http://x",
        instance="i",
        epoch=epoch,
        version=version,
        reason=reason,
    )


def pair(*, decode_epoch: int = 5) -> Making:
    making = Making()
    making.begin_attempt()
    making.add(grant("prefill", "p0", reason="pinned"))
    making.add(grant("decode", "d0", epoch=decode_epoch, version=f"v{decode_epoch}", reason="moved_wait"))
    return making


def test_headers_say_who_why_and_with_which_weights() -> None:
    assert dict(pair().headers()) == {
        "x-headrace-prefill": "p0",
        "x-headrace-decode": "d0",
        "x-headrace-choice": "prefill=pinned, decode=moved_wait",
        "x-headrace-epoch": "5",
        "x-headrace-weight-version": "v5",
        "x-headrace-single-version": "true",
    }


def test_the_label_says_the_same() -> None:
    assert json.loads(pair().label()) == {
        "prefill": "p0", "decode": "d0", "epochs": [5], "weight_versions": ["v5"], "single_version": True,
        "attempts": 1,
    }  # fmt: skip


def test_a_colocated_replica_is_both() -> None:
    making = Making()
    making.begin_attempt()
    making.add(grant("colocated", "c0"))
    label = json.loads(making.label())
    assert (label["prefill"], label["decode"]) == ("c0", "c0")


def test_a_decode_leg_alone_names_no_prefill_replica() -> None:
    making = Making()
    making.begin_attempt()
    making.add(grant("decode", "d0"))
    assert json.loads(making.label())["prefill"] is None
    assert "x-headrace-prefill" not in dict(making.headers())


def test_a_reply_is_of_a_single_version_if_and_only_if_all_its_legs_were() -> None:
    making = pair(decode_epoch=6)
    assert dict(making.headers())["x-headrace-epoch"] == "5, 6"
    assert json.loads(making.label())["single_version"] is False


def test_a_reply_whose_leg_was_kept_through_an_update_is_of_no_single_version() -> None:
    making = pair()
    making.kept = True
    assert json.loads(making.label())["single_version"] is False
    assert dict(making.headers())["x-headrace-single-version"] == "false"


def test_an_attempt_that_failed_leaves_no_trace() -> None:
    making = pair()
    making.begin_attempt()
    assert making.headers() == ()
    making.add(grant("prefill", "p1", epoch=6, version="v6"))
    label = json.loads(making.label())
    assert (label["prefill"], label["decode"], label["epochs"]) == ("p1", None, [6])


def test_what_the_client_has_seen_stays_in_the_label() -> None:
    making = pair()
    making.delivered()
    making.begin_attempt()
    making.add(grant("decode", "d1", epoch=6, version="v6"))
    label = json.loads(making.label())
    assert (label["epochs"], label["single_version"]) == ([5, 6], False)


def test_the_same_version_installed_twice_is_not_a_single_one() -> None:
    making = pair()
    making.add(grant("decode", "d0", epoch=6, version="v5"))
    label = json.loads(making.label())
    assert (label["weight_versions"], label["single_version"]) == (["v5", "v5"], False)


def test_a_trainers_name_can_not_break_the_headers() -> None:
    making = Making()
    making.begin_attempt()
    making.add(grant("colocated", "c0", version="é\r\nx-evil: 1"))
    header = dict(making.headers())["x-headrace-weight-version"]
    assert header.isascii()
    assert header.isprintable()
    assert json.loads(making.label())["weight_versions"] == ["é\r\nx-evil: 1"]
