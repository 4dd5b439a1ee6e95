"""Ranks that tell each other something: all come, or one does not and the others are not held up for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed

from tests.stack.weights.trainer_ranks import on_ranks

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(300)]

WAIT_S = 3.0


def exchange(rank: int) -> list[str]:
    from connectors.vllm_plugin.weights.agreement import EngineRanks

    assert distributed.group.WORLD is not None
    ranks = EngineRanks(rank, 2, [distributed.group.WORLD])
    return ranks.gather(f"first of {rank}", 60.0) + ranks.gather(f"second of {rank}", 60.0)


def miss(rank: int) -> str:
    from connectors.vllm_plugin.weights.agreement import AgreementLost, EngineRanks

    assert distributed.group.WORLD is not None
    ranks = EngineRanks(rank, 2, [distributed.group.WORLD])
    ranks.gather(None, 60.0)
    if rank == 1:
        return "elsewhere"
    try:
        ranks.gather("alone", WAIT_S)
    except AgreementLost as error:
        return str(error)
    return "agreed"


def test_all_know_what_all_said(tmp_path: Path) -> None:
    said = ["first of 0", "first of 1", "second of 0", "second of 1"]
    assert on_ranks(2, exchange, {}, tmp_path) == [said, said]


def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    alone, elsewhere = on_ranks(2, miss, {}, tmp_path)
    assert elsewhere == "elsewhere"
    assert "not every rank came" in alone
