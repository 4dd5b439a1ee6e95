"""Proves on real parts that no reply is computed from stale KV: `make check-stale`.

    python -m tests.stale.check [--schedules N] [--control N] [--first SEED] [--limit-s S]

Plays schedules on a real job, then holds every reply against a cache-less engine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness import Headrace
from tests.fleet.expected import weight_sets
from tests.fleet.job import ENGINES, STORAGE
from tests.stale.fleet import Fleet, job_fleet
from tests.stale.judge import Across, Reply, Stale, crossings, hits_across_epochs, judge
from tests.stale.play import Played, play
from tests.stale.reference import Question, reference
from tests.stale.schedule import Schedule, make_schedule
from tests.stale.stock import replica_by_replica, stock_fleet, without_faults

SCHEDULES = 50
CONTROL_SCHEDULES = 3


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is to be said of schedules that were played on one fleet."""

    played: Sequence[Played]
    stale: Sequence[Stale]
    hits_within_epoch: Sequence[int]
    """Prompt tokens from the pool, per schedule."""
    across: Sequence[Sequence[Across]]
    """Of each schedule."""
    crossings: Sequence[int]

    @property
    def replies(self) -> int:
        return sum(len(each.replies) for each in self.played)

    @property
    def hits_across_epochs(self) -> list[int]:
        """Prompt tokens, per schedule."""
        return [sum(each.tokens for each in found) for found in self.across]

    @property
    def complaints(self) -> list[str]:
        """All that must not be, in words."""
        found = [f"stale: {each}" for each in self.stale]
        for index, each in enumerate(self.played):
            seed = each.schedule.seed
            found += map(str, self.across[index])
            if self.hits_within_epoch[index] <= 0:
                found.append(f"schedule {seed}: nothing was read from the pool")
            if not self.crossings[index]:
                found.append(f"schedule {seed}: no prompt that another epoch had in the pool")
        return found


def play_all(fleet: Fleet, schedules: Iterable[Schedule], limit_s: float = math.inf) -> list[Played]:
    """Schedule after schedule; none begins once the time is up."""
    played: list[Played] = []
    ends = time.monotonic() + limit_s
    for schedule in schedules:
        if time.monotonic() > ends:
            break
        print(f"schedule {schedule.seed}: {schedule}", flush=True)
        played.append(asyncio.run(play(schedule, fleet)))
        print(f"  {played[-1]}", flush=True)
    return played


def play_control(home: Path, seeds: Sequence[int], limit_s: float = math.inf) -> list[Reply]:
    """Single-version replies of stock practice: the known scenario, then schedules. `home`: for the fleet's state."""
    # The scenario needs no second pair, and engines take long to start.
    with stock_fleet(home, pairs=2 if seeds else 1) as fleet:
        replies = list(asyncio.run(replica_by_replica(fleet)))
        print("control: the replica-by-replica scenario, and on stock engines", flush=True)
        played = play_all(fleet, [without_faults(each) for each in schedules_of(seeds)], limit_s)
    replies += [reply for each in played for reply in each.replies]
    # With two versions in one reply, either engine of the pair may have had either: no reference says what is right.
    return [reply for reply in replies if reply.of_one_epoch]


def schedules_of(seeds: Iterable[int]) -> list[Schedule]:
    return [make_schedule(seed, ENGINES, STORAGE) for seed in seeds]


def examine(played: Sequence[Played], scratch: Path) -> Findings:
    everything = [reply for each in played for reply in each.replies]
    across = [hits_across_epochs(each.replies, everything) for each in played]
    return Findings(
        played=played,
        stale=stale_replies(everything, scratch),
        hits_within_epoch=[
            each.pool_hits - sum(one.tokens for one in found) for each, found in zip(played, across, strict=True)
        ],
        across=across,
        crossings=[crossings(each.replies, everything) for each in played],
    )


def stale_replies(replies: Sequence[Reply], scratch: Path) -> list[Stale]:
    """Of the replies that can be judged, those that are not what their weights give."""
    asked = {reply: _questions(reply) for reply in replies if reply.judged}
    answers = reference([question for questions in asked.values() for question in questions], scratch)
    verdicts = [judge(reply, [answers[each] for each in questions]) for reply, questions in asked.items()]
    return [verdict for verdict in verdicts if verdict is not None]


def _questions(reply: Reply) -> list[Question]:
    return [Question(weight_sets()[weights], reply.prompt, reply.token_ids) for weights in reply.weights]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--schedules", type=int, default=SCHEDULES, help="how many; 0: none")
    arguments.add_argument("--control", type=int, default=CONTROL_SCHEDULES, help="how many on stock engines; 0: none")
    arguments.add_argument("--first", type=int, default=1, metavar="SEED", help="seed of the first")
    arguments.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which no schedule begins")
    chosen = arguments.parse_args()
    # Whatever ends it, the fleet goes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="headrace-stale-"))
    print(f"logs of the engines: {folder}", flush=True)
    complaints: list[str] = []
    wrong: list[Stale] = []
    played: list[Played] = []
    if chosen.control:
        seeds = range(chosen.first, chosen.first + chosen.control)
        wrong = stale_replies(play_control(folder / "control", seeds, chosen.limit_s), folder)
        for each in wrong:
            print(f"control, as it should be: {each}", flush=True)
        if not wrong:
            complaints.append("the control has found nothing wrong with stock practice")
    if chosen.schedules:
        seeds = range(chosen.first, chosen.first + chosen.schedules)
        with job_fleet(Headrace(folder / "job"), folder) as fleet:
            played = play_all(fleet, schedules_of(seeds), chosen.limit_s)
    found = examine(played, folder)
    complaints += found.complaints
    for complaint in complaints:
        print(complaint)
    if not complaints:
        shutil.rmtree(folder)
    result = {
        "schedules": len(found.played),
        "replies": found.replies,
        "stale": len(found.stale),
        "hits_within_epoch": sum(found.hits_within_epoch),
        "hits_across_epochs": sum(found.hits_across_epochs),
        "control_stale": len(wrong),
    }
    print(json.dumps(result))
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
