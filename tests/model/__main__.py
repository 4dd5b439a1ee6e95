"""`python -m tests.model [--short] [--limit SECONDS] [--only TEXT]`: explore every setup, then every missing safeguard.

Prints a line per exploration and the story of each violation. The last line is one JSON object. Exits with 1 where an
invariant is violated, a missing safeguard is not noticed, or an exploration was cut short by its time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from tests.model.explore import Found, explore
from tests.model.fleet import Setup
from tests.model.mutations import MUTATIONS, Mutation
from tests.model.setups import BOUNDS, every_setup, short_setups
from tests.model.world import Model

PROCESSES = 2


@dataclass(frozen=True)
class Summary:
    """What all explorations have found."""

    states: int
    violations: int
    mutations_caught: int
    mutations_total: int
    cut_short: int

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.cut_short and self.mutations_caught == self.mutations_total

    def to_json(self) -> str:
        told = {name: value for name, value in vars(self).items() if name != "cut_short"}
        return json.dumps(told)


def run(setups: Iterable[Setup], mutations: Iterable[Mutation], *, limit_s: float, processes: int) -> Summary:
    """Explore, and print what is found as it comes."""
    states = violations = caught = total = cut_short = 0
    mutated = {mutation.safeguard for mutation in mutations}
    for name, found in _all_found([*setups], mutated, limit_s, processes):
        states += found.states
        if name in mutated:
            total += 1
            caught += bool(found.violation)
            print(f"{found.states:9d} states  without {name}: {found.violation or 'NOT NOTICED'}", flush=True)
            continue
        violations += bool(found.violation)
        cut_short += not found.is_whole and not found.violation
        print(f"{found.states:9d} states  {found.seconds:6.1f} s  {name}: {_in_short(found)}", flush=True)
        print("".join(f"    {step}\n" for step in found.story), end="", flush=True)
    return Summary(states, violations, caught, total, cut_short)


def _in_short(found: Found) -> str:
    if found.violation:
        return f"VIOLATED {found.violation}"
    if not found.is_whole:
        return "CUT SHORT by its time"
    ends = ", ".join(f"{count} x {end}" for end, count in sorted(found.ends.items()))
    return f"replies of {', '.join(found.replies)}; ends: {ends}"


def _all_found(setups: list[Setup], mutated: set[str], limit_s: float, processes: int) -> Iterator[tuple[str, Found]]:
    with ProcessPoolExecutor(processes) as pool:
        work = {pool.submit(_explored, setup, limit_s): str(setup) for setup in setups}
        work |= {pool.submit(_mutated, name, limit_s): name for name in mutated}
        for done in as_completed(work):
            yield work[done], done.result()


def _explored(setup: Setup, limit_s: float) -> Found:
    return explore(Model(setup), limit_s=limit_s)


def _mutated(safeguard: str, limit_s: float) -> Found:
    mutation = next(each for each in MUTATIONS if each.safeguard == safeguard)
    with mutation.applied():
        return explore(Model(mutation.setup, safeguard, **mutation.tools), limit_s=limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few setups, in less than half a minute")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one exploration may take")
    parser.add_argument("--only", default="", help="setups and safeguards whose name has this in it")
    asked = parser.parse_args()
    began = time.monotonic()
    print(BOUNDS)
    setups = [each for each in (short_setups() if asked.short else every_setup()) if asked.only in str(each)]
    mutations = [each for each in MUTATIONS if asked.only in each.safeguard]
    found = run(setups, mutations, limit_s=asked.limit, processes=PROCESSES)
    print(f"{len(setups)} setups and {len(mutations)} missing safeguards in {time.monotonic() - began:.0f} s")
    print(found.to_json())
    return 0 if found.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
