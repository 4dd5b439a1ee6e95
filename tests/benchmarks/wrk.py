"""Closed-loop load: wrk keeps 64 connections busy, with `sessions.lua` for the requests.

`parts.py` reads rates and the routers' CPU time from it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.processes import BenchmarkError
from tests.benchmarks.workload import CONNECTIONS, PATH, SESSION_HEADER, SESSIONS

SCRIPT = Path(__file__).with_name("sessions.lua")


@dataclass(frozen=True, kw_only=True)
class WrkResult:
    """What wrk counted."""

    requests: int
    duration_s: float
    failed: int
    p50_ms: float
    p99_ms: float


def parse_result(output: str) -> WrkResult:
    """Read the line that the script prints when wrk is done."""
    found = json.loads(output.strip().splitlines()[-1])
    return WrkResult(
        requests=found["requests"],
        duration_s=found["duration_us"] / 1e6,
        failed=found["failed"],
        p50_ms=found["p50_us"] / 1e3,
        p99_ms=found["p99_us"] / 1e3,
    )


def run_wrk(port: int, body_file: Path, seconds: float) -> WrkResult:
    """Load a port; every reply must be a success."""
    argv = ["wrk", "--threads", "1", "--connections", str(CONNECTIONS), "--timeout", "30s"]
    argv += ["--duration", f"{max(1, round(seconds))}s", "--script", str(SCRIPT), f"http://127.0.0.1:{port}{PATH}"]
    done = subprocess.run(
        [*argv, "--", str(body_file), str(SESSIONS), SESSION_HEADER], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"wrk failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    result = parse_result(done.stdout)
    if result.failed or not result.requests:
        raise BenchmarkError(f"{result.failed} of {result.requests} requests on port {port} failed:\n{done.stdout}")
    return result
