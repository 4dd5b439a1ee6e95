"""`make faults`: `kill -9` of each kind of process of a real job of two pairs, under traffic.

For each: when the control plane had noted its end, when the job was whole again (all processes ready, all engines
routable in one epoch, the master counting the capacity that was planned), and how many requests of clients were not
answered meanwhile. The last line is one JSON object. Nothing fails because of a figure: exit code 1 says that the job
did not become whole again at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from connectors.store_argv import CAPACITY_METRIC
from deploy.probe import check
from deploy.unit import MetricProbe
from orchestrator.plan.kinds import MASTER, PROMETHEUS, ROUTER
from orchestrator.store.database import Database
from orchestrator.store.events import EventStore
from tests.e2e.harness import UP_TIMEOUT_S, Headrace, unit_pid, wait_until
from tests.fleet.control import Control, control_plane
from tests.fleet.job import NAME, STORAGE, fleet_table, wait_whole
from tests.fleet.traffic import served, traffic

CONTROL_PLANE = "control plane"
DOCUMENTED_S = {
    MASTER: 30.0,
    STORAGE: 60.0,
    "prefill-0": 180.0,
    "decode-0": 180.0,
    ROUTER: 30.0,
    PROMETHEUS: 30.0,
    CONTROL_PLANE: 30.0,
}
"""By the process that is killed, as orchestrator/README.md has it. Engines: those of this job, on two cores."""
QUIET_S = 5.0
"""Of traffic before each kill."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    process: str
    detected_s: float | None
    """None: nobody has to notice it."""
    recovered_s: float
    failed: int
    """Requests that were not answered with 200."""
    answered: int

    def __str__(self) -> str:
        detected = "-" if self.detected_s is None else f"{self.detected_s:.1f} s"
        return (
            f"{self.process:<20}{detected:>12}{self.recovered_s:>11.1f} s{DOCUMENTED_S[self.process]:>11.0f} s"
            f"{self.failed:>9}{self.answered:>10}"
        )


HEAD = f"{'process':<20}{'detected':>12}{'recovered':>13}{'documented':>13}{'failed':>9}{'answered':>10}"


def fault(process: str, job: dict[str, Any], control: Control, events: EventStore) -> Fault:
    """Kill it, and wait until the job is whole again."""
    kill = _kill_control_plane if process == CONTROL_PLANE else _kill_unit
    with traffic(job) as replies:
        time.sleep(QUIET_S)
        cursor, killed_at = events.newest_seq(), time.time()
        kill(process, control)
        if process != CONTROL_PLANE:
            wait_until(f"the end of {process} is noted", lambda: _ended_at(events, cursor, process) is not None)
        _wait_whole(job, control)
        recovered_s = time.time() - killed_at
    ended_at = _ended_at(events, cursor, process)
    return Fault(
        process=process,
        detected_s=None if ended_at is None else ended_at - killed_at,
        recovered_s=recovered_s,
        failed=len(replies) - len(served(replies)),
        answered=len(served(replies)),
    )


def _kill_unit(process: str, control: Control) -> None:
    os.kill(unit_pid(control.status(), process), signal.SIGKILL)


def _kill_control_plane(_process: str, control: Control) -> None:
    control.kill()
    control.start()


def _ended_at(events: EventStore, cursor: int, process: str) -> float | None:
    found = [each for each in events.since(cursor, 1000, NAME) if each.event.kind == "process_ended"]
    return next((each.at for each in found if each.event.process == process), None)


def _wait_whole(job: dict[str, Any], control: Control) -> None:
    wait_whole(job, control)
    pool = job["pool"]
    url, planned = str(pool["metrics_url"]), float(pool["capacity_bytes"])

    def counts(at_least: float) -> bool:
        return check(MetricProbe(url=url, metric=CAPACITY_METRIC, at_least=at_least), ()).ready

    # A client that died is counted for a while beside the one that took its place.
    wait_until("the master counts its plan", lambda: counts(planned) and not counts(planned + 1), UP_TIMEOUT_S)


@contextmanager
def whole_job(folder: Path) -> Iterator[tuple[dict[str, Any], Control, EventStore]]:
    headrace = Headrace(folder)
    table = fleet_table() | {"monitoring": {"enabled": shutil.which("prometheus") is not None}}
    with control_plane(headrace, NAME) as control, control.running_job(table) as job:
        _wait_whole(job, control)
        yield job, control, EventStore(Database(headrace.home))


def play(processes: Sequence[str], folder: Path, say: Callable[[str], None]) -> list[Fault]:
    found: list[Fault] = []
    with whole_job(folder) as (job, control, events):
        present = {unit["name"] for unit in control.status()["units"]} | {CONTROL_PLANE}
        say(HEAD)
        for process in (each for each in processes if each in present):
            found.append(fault(process, job, control, events))
            say(str(found[-1]))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--process", action="append", choices=DOCUMENTED_S, help="only this one; may be repeated")
    chosen = arguments.parse_args()
    # Whatever ends it, the fleet goes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    print(f"logs of the job: {folder}", flush=True)
    try:
        found = play(chosen.process or [*DOCUMENTED_S], folder, lambda text: print(text, flush=True))
    except AssertionError as error:
        sys.exit(f"the job is not whole again: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"faults": [asdict(each) for each in found]}))


if __name__ == "__main__":
    main()
