"""Proves on real parts that no reply is computed from stale KV: `make check-stale`.

    python -m tests.stale.check [--schedules N] [--control N] [--first SEED]

Plays schedules on a real job, then holds every reply against a cache-less engine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.harness import Headrace
from tests.stale.fleet import ENGINES, NAME, STORAGE, Fleet, JobFleet, job, weight_sets
from tests.stale.judge import Reply, Stale, crossings, hits_across_epochs, judge
from tests.stale.play import Played, play
from tests.stale.reference import KEPT, Question, reference
from tests.stale.schedule import make_schedule
from tests.stale.stock import replica_by_replica, stock_fleet, without_faults
from tests.stale.updates import Barrier

SCHEDULES = 50
CONTROL_SCHEDULES = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """The last line."""

    schedules: int
    replies: int
    stale: int
    hits_within_epoch: int
    hits_across_epochs: int
    control_stale: int


@contextmanager
def job_fleet(headrace: Headrace, scratch: Path) -> Iterator[JobFleet]:
    """The job, running."""
    try:
        status = headrace.up(job())
        yield JobFleet(status, Barrier(status), scratch)
    finally:
        headrace.down(NAME)


def play_all(fleet: Fleet, seeds: Sequence[int]) -> list[Played]:
    played = []
    for seed in seeds:
        played.append(asyncio.run(play(make_schedule(seed, ENGINES, STORAGE), fleet)))
        print(played[-1], flush=True)
    return played


def play_control(seeds: Sequence[int]) -> list[Reply]:
    """Replies of stock practice: first the known scenario, then schedules."""
    if not seeds:
        return []
    with stock_fleet(KEPT / "state") as fleet:
        replies = list(asyncio.run(replica_by_replica(fleet)))
        for seed in seeds:
            played = asyncio.run(play(without_faults(make_schedule(seed, ENGINES, STORAGE)), fleet))
            print(f"control: {played}", flush=True)
            replies += played.replies
    return replies


def stale_replies(replies: Sequence[Reply], scratch: Path) -> list[Stale]:
    """Of the replies that can be judged, those that are not what their weights give."""
    questions = {
        reply: Question(weight_sets()[reply.weights], reply.prompt, reply.token_ids)
        for reply in replies
        if reply.judged
    }
    answers = reference(list(questions.values()), scratch)
    verdicts = [judge(reply, answers[question]) for reply, question in questions.items()]
    return [verdict for verdict in verdicts if verdict is not None]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--schedules", type=int, default=SCHEDULES, help="how many")
    arguments.add_argument("--control", type=int, default=CONTROL_SCHEDULES, help="how many on stock engines; 0: none")
    arguments.add_argument("--first", type=int, default=1, metavar="SEED", help="seed of the first")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wrong = stale_replies(play_control(range(chosen.first, chosen.first + chosen.control)), scratch)
        for each in wrong:
            print(f"control: {each}")
        with job_fleet(Headrace(KEPT / "state"), scratch) as fleet:
            played = play_all(fleet, range(chosen.first, chosen.first + chosen.schedules))
        replies = [reply for each in played for reply in each.replies]
        stale = stale_replies(replies, scratch)
    for each in stale:
        print(f"stale: {each}")
    across = hits_across_epochs(replies)
    result = Result(
        schedules=len(played),
        replies=len(replies),
        stale=len(stale),
        hits_within_epoch=sum(each.pool_hits for each in played) - across,
        hits_across_epochs=across,
        control_stale=len(wrong),
    )
    print(f"{crossings(replies)} crossings")
    print(json.dumps(asdict(result)))
    sys.exit(1 if stale or across or (chosen.control and not wrong) else 0)


if __name__ == "__main__":
    main()
