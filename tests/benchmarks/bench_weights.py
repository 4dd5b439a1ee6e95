"""`make bench-weights`: weight loads beside plain transfers of the same bytes, in one run.

Runs the parts of `weights/parts.py` and prints the report of `figures.py`; the last line is one JSON object. Figures
are printed with what they should be and nothing fails because of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.benchmarks.figures import Figure, result_line
from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.weights.goals import GOALS
from tests.benchmarks.weights.outputs import measure_outputs
from tests.benchmarks.weights.parts import (
    TRANSPORTS,
    Scale,
    measure_gpu_fetch,
    measure_nixl,
    measure_prefetch,
    measure_transports,
    say,
)
from tests.benchmarks.weights.shapes import SHAPES
from tests.benchmarks.weights.trainer import IN_HOST

PARTS: dict[str, Callable[[Scale], list[Figure]]] = {
    "transports": measure_transports,
    "nixl": measure_nixl,
    "gpu_fetch": measure_gpu_fetch,
    "cpu_prefetch": measure_prefetch,
    "outputs": measure_outputs,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-weights-", dir=arguments.folder) as folder:
            scale = Scale(
                rounds=1 if arguments.quick else arguments.rounds,
                shape="tiny" if arguments.quick else arguments.shape,
                device="cuda" if torch.cuda.is_available() else "cpu",
                folder=Path(folder),
                transports=tuple(arguments.transports or _usual_transports()),
            )
            _run(scale, arguments.only, began)
    except BenchmarkError as error:
        sys.stderr.write(f"bench-weights: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nbench-weights: stopped\n")
        return 130
    return 0


def _run(scale: Scale, names: Sequence[str], began: float) -> None:
    where = torch.cuda.get_device_name() if scale.device == "cuda" else f"{os.cpu_count()} cores"
    say(
        f"{scale.shape}: {scale.weight_bytes / 1e9:.2f} GB of bfloat16, {SHAPES[scale.shape].layers} layers; {where}, "
        f"Python {platform.python_version()}, Linux {platform.release()}"
    )
    figures: list[Figure] = []
    for name in names:
        say(f"{name} ...")
        figures += PARTS[name](scale)
    for figure in figures:
        say("\n" + figure.report())
    say(f"\ntook {time.monotonic() - began:.0f} s; load average now {os.getloadavg()[0]:.1f}")
    say(result_line(figures, GOALS))


def _usual_transports() -> Sequence[str]:
    """On a CPU all trainers are in host memory."""
    return [each for each in TRANSPORTS if each != IN_HOST or torch.cuda.is_available()]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-weights", description="Compare weight loads with plain transfers."
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=list(SHAPES), default="1gb")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model: does it run?")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, metavar="TRANSPORT")
    parser.add_argument(
        "--folder", default="/dev/shm", help="for versions and logs; a disk here is measured with the loads"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
