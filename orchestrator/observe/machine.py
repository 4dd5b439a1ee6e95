"""What this machine is: cores, memory, GPUs, NVLink. Read from the kernel and from nvidia-smi."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from orchestrator.plan.facts import NodeFacts

ASK_TIMEOUT_S = 15.0


def this_machine() -> NodeFacts:
    """The one node of a local job; everything on it talks over loopback."""
    gpus = count_gpus(_ask("nvidia-smi", "-L"))
    return NodeFacts(
        name=socket.gethostname(),
        address="127.0.0.1",
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=gpus,
        memory_bytes=memory_bytes(Path("/proc/meminfo").read_text(encoding="ascii")),
        nvlink=sees_nvlink(_ask("nvidia-smi", "topo", "-m")) if gpus > 1 else (False if gpus else None),
    )


def memory_bytes(meminfo: str) -> int:
    """MemTotal of /proc/meminfo, in bytes."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, flags=re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def count_gpus(listing: str) -> int:
    """GPUs in the output of `nvidia-smi -L`."""
    return len(re.findall(r"^GPU \d+:", listing, flags=re.MULTILINE))


def sees_nvlink(topology: str) -> bool | None:
    """Whether every pair of GPUs in `nvidia-smi topo -m` is joined by NVLink ("NV18"); None where it said nothing."""
    rows = [line.split() for line in topology.splitlines() if line.startswith("GPU")]
    count = len(rows)
    links = [cell for row in rows for cell in row[1 : 1 + count] if cell != "X"]
    return all(cell.startswith("NV") for cell in links) if links else None


def _ask(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
