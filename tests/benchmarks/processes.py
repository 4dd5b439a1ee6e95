"""Processes that the benchmark starts and ends, each by its pid, and what the kernel says of them.

`stubs.py` and `routers.py` start theirs here; the measuring modules read CPU time and memory.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections, of which the benchmark opens many."""
END_S = 15.0
LOG_LINES = 15


class BenchmarkError(Exception):
    """The benchmark can't go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A program that runs; its tree may hold more processes than the one started."""

    name: str
    pid: int
    log: Path
    popen: subprocess.Popen[bytes]

    def check_alive(self) -> None:
        if self.popen.poll() is not None:
            raise BenchmarkError(f"{self.name} ended with exit code {self.popen.returncode}. {self.log_end()}")

    def log_end(self) -> str:
        """For messages: the log itself is gone when the benchmark has ended."""
        return "The end of its log:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


@contextmanager
def started(
    name: str, argv: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """A program in a session of its own, so that Ctrl-C reaches the benchmark alone, which then ends the program."""
    log = folder / f"{name}.log"
    with ExitStack() as stack:
        with _undisturbed(), log.open("ab") as output:
            popen = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=os.environ | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(end, popen)
        yield Process(name=name, pid=popen.pid, log=log, popen=popen)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect when this is left: no program is started, or left to itself, unnoticed."""
    held: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda number, _frame: held.append(number)) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if held:
        raise KeyboardInterrupt


def end(popen: subprocess.Popen[Any]) -> None:
    with _undisturbed():
        _terminate(popen)


def _terminate(popen: subprocess.Popen[Any]) -> None:
    descendants = tree(popen.pid)[1:]
    popen.terminate()
    try:
        popen.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    for pid in descendants:
        # What an orderly end of the parent has left; its session tells it from a stranger with a reused pid.
        with suppress(ProcessLookupError):
            if os.getsid(pid) == popen.pid:
                os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Different ports on which nothing listens now and that no former call has given out."""
    return [free_port_range(1) for _ in range(count)]


def free_port_range(length: int) -> int:
    """The first of `length` such ports in a row."""
    for first in random.sample(PORTS[: 1 - length or None], len(PORTS) - length + 1):
        ports = range(first, first + length)
        if _given_out.isdisjoint(ports) and all(_is_free(port) for port in ports):
            _given_out.update(ports)
            return first
    raise BenchmarkError(f"No {length} free ports in a row from {PORTS[0]} to {PORTS[-1]}: end programs that listen.")


_given_out: set[int] = set()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def tree(pid: int) -> list[int]:
    """The process and all its descendants; without those that have ended."""
    pids = [pid]
    for each in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


class CpuMeter:
    """CPU time of a process tree from now on.

    Read per thread from the scheduler, in nanoseconds: /proc/PID/stat counts in ticks of 10 ms. A thread that ends
    takes its time with it; those that serve requests live as long as their process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = _thread_times_ns(pid)
        self._began = time.monotonic()

    def used_s(self) -> float:
        now = _thread_times_ns(self._pid)
        return sum(spent - self._before.get(thread, 0) for thread, spent in now.items()) / 1e9

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began


def _thread_times_ns(pid: int) -> dict[str, int]:
    times = {}
    for each in tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{each}/task").iterdir():
                times[task.name] = int((task / "schedstat").read_text().split()[0])
    return times


def open_files(pid: int) -> int:
    """Files and sockets that a process tree holds open."""
    return sum(len(list(Path(f"/proc/{each}/fd").iterdir())) for each in tree(pid))


def resident_mb(pid: int) -> float:
    """Resident memory of a process tree. smaps_rollup is exact where statm lags behind by some pages per core."""
    total_kb = 0
    for each in tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total_kb += next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    return total_kb / 1000
