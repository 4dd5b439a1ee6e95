"""What the benchmark needs and `make setup` does not install: wrk, and the peer in an environment of its own.

`bench_router.py` calls `install` first. The peer's dependencies must not meet ours, so it never enters `.venv`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys

from deploy.local.bootstrap import LOGS, ROOT, SetupError, install_debian, one_at_a_time, run_logged
from tests.benchmarks.processes import BenchmarkError

PEER = "vllm-router==0.1.17"
PEER_VENV = ROOT / ".cache" / "vllm-router"
PEER_PROGRAM = PEER_VENV / "bin" / "vllm-router"
_STAMP = PEER_VENV / "installed"
"""Holds PEER once it is installed; a run that was killed leaves none."""


def install() -> None:
    """
    Raises:
        BenchmarkError: something is missing and can't be installed from here; with what mends it.
    """
    for module in ("uvloop", "httptools"):
        if importlib.util.find_spec(module) is None:
            raise BenchmarkError(
                f"{module} is not installed in {sys.prefix}: run `make stack`, or pip install {module}"
            )
    try:
        with one_at_a_time():
            if shutil.which("wrk") is None:
                install_debian(["wrk"])
            if not _STAMP.is_file() or _STAMP.read_text() != PEER:
                _install_peer()
    except SetupError as error:
        raise BenchmarkError(str(error)) from error


def _install_peer() -> None:
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(PEER_VENV)],
        [str(PEER_VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", PEER],
        [str(PEER_PROGRAM), "--help"],
    ]
    run_logged(f"the peer, {PEER}, in {PEER_VENV}", commands, LOGS / "bench-router.log")
    _STAMP.write_text(PEER)
