"""`make bench-router`: our router beside the peer, on the same stub engines, under the same load, in one run.

Runs the parts of `parts.py`, prints the report of `figures.py` and where our router's time goes (`where_time_goes.py`);
the last line is one JSON object. Figures are printed with what they should be and nothing fails because of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.figures import Figure, result_line
from tests.benchmarks.parts import (
    Scale,
    measure_choice,
    measure_idle,
    measure_latency,
    measure_streaming,
    measure_throughput,
    say,
)
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.requirements import PEER, install
from tests.benchmarks.where_time_goes import time_report

PARTS: dict[str, Callable[[Scale], list[Figure]]] = {
    "throughput": measure_throughput,
    "latency": measure_latency,
    "streams": measure_streaming,
    "choice": measure_choice,
    "idle": measure_idle,
}
PROFILE = "profile"
OPEN_FILES_PER_SESSION = 1.2
"""Of the benchmark and of a router: one connection each, and some for the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    try:
        install()
        with tempfile.TemporaryDirectory(prefix="bench-router-") as folder:
            scale = _scale(arguments, Path(folder))
            _allow_open_files(scale.idle_sessions)
            _run(scale, arguments.only, began)
    except BenchmarkError as error:
        sys.stderr.write(f"bench-router: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nbench-router: stopped\n")
        return 130
    return 0


def _run(scale: Scale, names: Sequence[str], began: float) -> None:
    python, linux = platform.python_version(), platform.release()
    say(f"{PEER} and this router; {os.cpu_count()} cores, Python {python}, Linux {linux}")
    figures: list[Figure] = []
    for name in names:
        if name != PROFILE:
            say(f"{name} ...")
            figures += PARTS[name](scale)
    time_goes = time_report(scale) if PROFILE in names else ""
    for figure in figures:
        say("\n" + figure.report())
    say(f"\n{time_goes}\ntook {time.monotonic() - began:.0f} s; load average now {os.getloadavg()[0]:.1f}")
    say(result_line(figures))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-router", description="Compare the router with its peer.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each timed window")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run, not what does it cost")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, PROFILE], default=[*PARTS, PROFILE], metavar="PART")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="fields of our router's settings to change"
    )
    return parser.parse_args(argv)


def _scale(arguments: argparse.Namespace, folder: Path) -> Scale:
    return Scale(
        rounds=1 if arguments.quick else arguments.rounds,
        seconds=1.0 if arguments.quick else arguments.seconds,
        idle_sessions=1_000 if arguments.quick else 10_000,
        folder=folder,
        settings={"workers": os.cpu_count() or 1} | arguments.settings,
    )


def _allow_open_files(sessions: int) -> None:
    """Raise the limit for this process and those it starts."""
    wanted = int(sessions * OPEN_FILES_PER_SESSION)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchmarkError(f"{wanted} open files are needed and {hard} are allowed: raise the limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


if __name__ == "__main__":
    sys.exit(main())
