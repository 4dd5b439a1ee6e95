"""What the fence believes of the ranks' answers."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.vllm_plugin.weights.verdict import LoadResult, RankReport, WeightCommand, judge

CALL = "call-7"


def report(rank: int, **more: Any) -> dict[str, Any]:
    return RankReport(**{"call": CALL, "rank": rank, "ranks": 2, "ok": True, **more}).to_wire()


def test_commands_and_reports_survive_the_wire() -> None:
    command = WeightCommand(name="load", call=CALL, order=(1, 2, 3), source={"version": "v"}, mode="gpu_fetch")
    assert WeightCommand.from_wire(command.to_wire()) == command
    said = RankReport(call=CALL, rank=0, ranks=1, ok=True, last_load=LoadResult(ok=True, version="v"), order=[1, 2, 3])
    assert RankReport.from_wire(said.to_wire()) == said


def test_all_ranks_agree() -> None:
    verdict = judge(CALL, [report(0, version="v"), report(1, version="v")], 2)
    assert (verdict.ok, verdict.error, verdict.torn, verdict.lost) == (True, "", "", "")


def test_one_failed_rank_fails_the_engine() -> None:
    verdict = judge(CALL, [report(0), report(1, ok=False, error="no such file", torn="half written")], 2)
    assert (verdict.ok, verdict.torn, verdict.lost) == (False, "half written", "")
    assert "no such file" in verdict.error


@pytest.mark.parametrize(
    "answers",
    [
        [report(0), report(1, call="call-6")],
        [report(0), None],
        [report(0), {"result": 3}],
        [report(0), report(0)],
        [report(1)],
        [],
        [report(0, version="v"), report(1, version="w")],
        [report(0), report(1, lost="a rank did not come", ok=False)],
    ],
)
def test_answers_that_cannot_be_believed_end_this_life(answers: list[Any]) -> None:
    verdict = judge(CALL, answers, 2)
    assert verdict.lost
    assert not verdict.ok
