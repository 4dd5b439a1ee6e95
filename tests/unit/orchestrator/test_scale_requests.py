"""What comes next of a request to scale a role, where its way does not end by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.replica_requests import End
from orchestrator.scale_requests import ReplicaSight, ScaleAct, ScaleSight, Settle, next_scale_act
from orchestrator.store.keeping import ReplicaRequest

REQUEST = ReplicaRequest(
    job="demo",
    run_id="run-1",
    number=1,
    kind="scale",
    unit="prefill",
    why="",
    is_forced=False,
    life="",
    replicas=1,
    asked_at=0.0,
    begun_at=10.0,
    outcome=None,
    note="",
    ended_at=None,
)
LEAVES = ReplicaSight(
    name="prefill-1",
    role="prefill",
    state="ready",
    given_up=None,
    replica=None,
    is_settled=False,
    is_drained=False,
    is_new=False,
)
STAYS = replace(LEAVES, name="prefill-0", state="coming_up", is_new=True)
SIGHT = ScaleSight(
    request=REQUEST,
    refusal="",
    is_moving=False,
    is_planned=False,
    leaving=(LEAVES,),
    staying=(),
    has_surplus=False,
    unended="",
    drain_s=20.0,
    since=10.0,
    serves_within_s=100.0,
)
MOVING = {"leaving": (replace(LEAVES, is_settled=True),), "is_moving": True}


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, Settle(names=("prefill-1",)), "handoffs are still unread after 100 s; nothing has changed, ask again"),
        (MOVING, "wait", "weights still move after 100 s; nothing has changed, ask again"),
        ({**MOVING, "is_moving": False}, "plan", None),
        ({"is_planned": True, "has_surplus": True}, "wait", "who left has not ended"),
        ({"is_planned": True, "staying": (STAYS,)}, "wait", "prefill-0 is not up after 100 s"),
    ],
)
def test_no_way_is_waited_upon_for_ever(changes: dict[str, Any], before: ScaleAct, after: str | None) -> None:
    sight = replace(SIGHT, **changes)
    assert next_scale_act(sight, 110.0) == before
    assert next_scale_act(sight, 111.0) == (before if after is None else End(outcome="failed", note=after))
    assert next_scale_act(replace(sight, since=50.0), 111.0) == before, "by another keeper than the one that began it"
