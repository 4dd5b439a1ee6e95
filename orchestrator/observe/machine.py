"""What this machine is: cores, memory, GPUs, NVLink, ports. Read from the kernel and from nvidia-smi; what was read is
given its meaning by functions of text."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from connectors.mooncake import EPHEMERAL_PORTS_FROM
from orchestrator.plan.facts import NodeFacts

ASK_TIMEOUT_S = 15.0
_GPU = re.compile(r"GPU\d+$")
_CGROUPS = Path("/sys/fs/cgroup")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_NO_LIMIT = 2**60
"""cgroup v1 writes "no limit" as the largest multiple of a page below 2**63."""


def this_machine() -> NodeFacts:
    """The one node of a local job; everything on it talks over loopback."""
    gpu_ids = visible_gpus(_ask("nvidia-smi", "-L"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = len(gpu_ids)
    return NodeFacts(
        name=socket.gethostname(),
        address="127.0.0.1",
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=gpus,
        memory_bytes=_usable_memory(),
        nvlink=sees_nvlink(_ask("nvidia-smi", "topo", "-m")) if gpus > 1 else (False if gpus else None),
        visible_gpus=gpu_ids,
        bf16=computes_bf16(read_or_nothing(Path("/proc/cpuinfo"))),
        outgoing_ports_from=first_outgoing_port(read_or_nothing(Path("/proc/sys/net/ipv4/ip_local_port_range"))),
    )


def _usable_memory() -> int:
    total = memory_bytes(read_or_nothing(Path("/proc/meminfo")))
    files = memory_limit_files(read_or_nothing(Path("/proc/self/cgroup")))
    limits = [memory_limit(read_or_nothing(_CGROUPS / file)) for file in files]
    return min([total, *(limit for limit in limits if limit is not None)])


def memory_bytes(meminfo: str) -> int:
    """MemTotal of /proc/meminfo, in bytes; 0 where it does not say."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, flags=re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def memory_limit_files(own_groups: str) -> tuple[str, ...]:
    """The files below the cgroup mount that may limit the memory of a process whose /proc/PID/cgroup is `own_groups`:
    of its own group and of each group above it, since every one of them counts. v2 has one line with no controller."""
    found: list[str] = []
    for line in own_groups.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base, name = "", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "memory/", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        found += [base + "/".join([*parts[:depth], name]) for depth in range(len(parts), -1, -1)]
    return tuple(found)


def memory_limit(text: str) -> int | None:
    """A cgroup's limit in bytes; None for no limit ("max", or v1's number for it) and for a file that is not there."""
    value = text.strip()
    return int(value) if value.isdecimal() and int(value) < _NO_LIMIT else None


def computes_bf16(cpuinfo: str) -> bool:
    """Whether the CPU has instructions for bfloat16, by the flags of /proc/cpuinfo (x86-64) or its features (Arm)."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, flags=re.MULTILINE)
    if flags is not None:
        return not _BF16_FLAGS.isdisjoint(flags[1].split())
    features = re.search(r"^Features\s*:(.*)$", cpuinfo, flags=re.MULTILINE)
    return features is not None and "bf16" in features[1].split()


def first_outgoing_port(port_range: str) -> int:
    """The lower end of ip_local_port_range; Linux's own where it does not say."""
    words = port_range.split()
    return int(words[0]) if words and words[0].isdecimal() else EPHEMERAL_PORTS_FROM


def visible_gpus(listing: str, named: str | None) -> tuple[str, ...]:
    """Ids of the GPUs in the output of `nvidia-smi -L` that an inherited CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: indexes or UUIDs (a beginning will do), and what comes after the first unknown one is not seen.
    """
    indexes = re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE)
    if named is None:
        return tuple(indexes)
    uuids = re.findall(r"\(UUID: ([^)]+)\)", listing)
    seen: list[str] = []
    for word in (part.strip() for part in named.split(",")):
        by_uuid = word.startswith(("GPU-", "MIG-")) and any(uuid.startswith(word) for uuid in uuids)
        if (word not in indexes and not by_uuid) or word in seen:
            break
        seen.append(word)
    return tuple(seen)


def sees_nvlink(topology: str) -> bool | None:
    """Whether every pair of GPUs in `nvidia-smi topo -m` is joined by NVLink ("NV18"); None where it said nothing."""
    lines = [line.split() for line in topology.splitlines()]
    # The line of column names also begins with a GPU, behind a tab and an escape code; its second word is one too.
    rows = [cells for cells in lines if len(cells) > 1 and _GPU.match(cells[0]) and not _GPU.match(cells[1])]
    links = [cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"]
    return all(cell.startswith("NV") for cell in links) if links else None


def read_or_nothing(path: Path) -> str:
    """A small text file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _ask(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
