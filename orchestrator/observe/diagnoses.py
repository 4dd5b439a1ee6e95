"""What is found on a machine -> what it means for a job here, and the command that mends it. Pure.

`doctor.py` looks, this module judges, `cli_show.py` shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from connectors.mooncake import EPHEMERAL_PORTS_FROM
from connectors.types import EngineAbilities
from orchestrator.plan.facts import NodeFacts

GIB = 2**30
FILES_NEEDED = 4096
DISK_NEEDED_GIB = 2
SHM_NEEDED_GIB = 1

Verdict = Literal["ok", "warn", "fail"]

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
"""What Mooncake's programs may load, even for tcp, and the Debian package of each."""

ALWAYS_LOADED = ("libibverbs.so.1", "libnuma.so.1")
"""Without them no build of Mooncake starts; the wheel of 0.3.13 carries its own liburing and does without librdmacm."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    subject: str
    verdict: Verdict
    found: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def system(name: str, details: str) -> Diagnosis:
    """`name`: of the kernel, as `uname -s` gives it."""
    return Diagnosis(
        subject="system",
        verdict="ok" if name == "Linux" else "fail",
        found=f"{name} {details}",
        mend="run Headrace on Linux",
    )


def cores_and_memory(node: NodeFacts) -> Diagnosis:
    memory = f"{node.memory_bytes / GIB:.0f} GiB" if node.memory_bytes else "memory unknown: /proc/meminfo says nothing"
    few = len(node.cores) < 2
    mend = "two CPU engines on one core wait for each other; use two cores or more" if few else "mount /proc"
    return Diagnosis(
        subject="cpu and memory",
        verdict="warn" if few or not node.memory_bytes else "ok",
        found=f"{len(node.cores)} cores, {memory}",
        mend=mend,
    )


def gpus(node: NodeFacts, engine_platform: str | None) -> Diagnosis:
    """`engine_platform`: of the installed vLLM; None where none is installed."""
    if not node.gpus and engine_platform == "cuda":
        found = "vLLM is built for CUDA, and nvidia-smi sees no GPU"
        return Diagnosis(subject="gpus", verdict="fail", found=found, mend="check the driver with nvidia-smi")
    if not node.gpus:
        return Diagnosis(subject="gpus", verdict="ok", found="none seen by nvidia-smi; CPU engines only")
    links = {True: ", NVLink between all", False: ", no NVLink between all", None: ", links unknown"}[node.nvlink]
    return Diagnosis(subject="gpus", verdict="ok", found=f"{node.gpus}{links if node.gpus > 1 else ''}")


def library(name: str, problem: str | None) -> Diagnosis:
    """`problem`: the loader's words, None where the library was loaded."""
    if problem is None:
        return Diagnosis(subject=name, verdict="ok", found="present")
    mend = f"apt-get install {LIBRARIES[name]}"
    verdict: Verdict = "fail" if name in ALWAYS_LOADED else "warn"
    return Diagnosis(subject=name, verdict=verdict, found=f"cannot be loaded: {problem}", mend=mend)


def open_files(limit: int | None, hard_limit: int | None) -> Diagnosis:
    """Limits are None where there is none."""
    return Diagnosis(
        subject="open files",
        verdict="ok" if limit is None or limit >= FILES_NEEDED else "warn",
        found=f"limit {_limit(limit)} (hard {_limit(hard_limit)})",
        mend=f"ulimit -n {FILES_NEEDED} before starting; every open request takes two",
    )


def locked_memory(limit: int | None, hard_limit: int | None) -> Diagnosis:
    return Diagnosis(
        subject="locked memory",
        verdict="ok" if limit is None else "warn",
        found=f"limit {_limit(limit)} (hard {_limit(hard_limit)})",
        mend="ulimit -l unlimited; RDMA registers memory by locking it (tcp does without)",
    )


def state_folder(folder: Path, free_bytes: int | None, *, writable: bool) -> Diagnosis:
    """`folder`: the state folder, or the nearest one above it that exists. `free_bytes` None: it could not be asked."""
    if free_bytes is None or not writable:
        mend = "make it writable, or set HEADRACE_HOME to another folder"
        return Diagnosis(subject="state folder", verdict="fail", found=f"{folder} cannot be written", mend=mend)
    mend = f"free {DISK_NEEDED_GIB} GiB there, or set HEADRACE_HOME"
    return _space("state folder", folder, free_bytes, DISK_NEEDED_GIB, mend)


def shared_memory(folder: Path, free_bytes: int | None) -> Diagnosis:
    """`free_bytes` None: the folder is not there."""
    if free_bytes is None:
        mend = f"mount -t tmpfs tmpfs {folder}; engines share memory there"
        return Diagnosis(subject=str(folder), verdict="fail", found="not mounted", mend=mend)
    mend = f"free {SHM_NEEDED_GIB} GiB there (in a container: --shm-size)"
    return _space(str(folder), folder, free_bytes, SHM_NEEDED_GIB, mend)


def _space(subject: str, folder: Path, free_bytes: int, needed_gib: int, mend: str) -> Diagnosis:
    enough = free_bytes >= needed_gib * GIB
    found = f"{free_bytes / GIB:.1f} GiB free in {folder}"
    return Diagnosis(subject=subject, verdict="ok" if enough else "warn", found=found, mend=mend)


def control_plane(python: str, versions: Mapping[str, str | None]) -> Diagnosis:
    """`versions`: of the packages that the control plane and the router need; None where one is missing."""
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        mend = f"{python} -m pip install {' '.join(missing)}"
        found = f"{python} lacks {', '.join(missing)}"
        return Diagnosis(subject="control plane", verdict="fail", found=found, mend=mend)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Diagnosis(subject="control plane", verdict="ok", found=f"{python}: {listed}")


def engine_missing(problem: str) -> Diagnosis:
    mend = "make stack (CPU), or .venv/bin/python -m pip install -e '.[gpu]' (GPU), in Headrace's repository"
    return Diagnosis(subject="engine stack", verdict="fail", found=problem, mend=mend)


def engine_stack(abilities: EngineAbilities) -> list[Diagnosis]:
    """vLLM and what it runs with, as the installed code answered."""
    vllm = f"{abilities.vllm_version} ({abilities.platform}) in {abilities.python}"
    found = [Diagnosis(subject="vllm", verdict="ok", found=vllm)]
    for subject, version, package in (
        ("nixl", abilities.nixl_version, "nixl"),
        ("mooncake", abilities.mooncake_version, "mooncake-transfer-engine"),
    ):
        found.append(
            Diagnosis(
                subject=subject,
                verdict="ok" if version else "fail",
                found=version or "not installed",
                mend=f"{abilities.python} -m pip install {package}",
            )
        )
    if not abilities.save_decode_cache:
        lacks = f"vLLM {abilities.vllm_version} cannot save decode blocks: a completion is not found in the pool later"
        found.append(Diagnosis(subject="abilities", verdict="warn", found=lacks, mend="install vLLM 0.32"))
    return found


def outgoing_ports(port_range: str) -> Diagnosis:
    """`port_range`: /proc/sys/net/ipv4/ip_local_port_range; empty where it could not be read."""
    ends = port_range.split()
    if len(ends) != 2 or not all(end.isdecimal() for end in ends):
        found = "the range of outgoing ports cannot be read from /proc"
        return Diagnosis(subject="ports", verdict="warn", found=found, mend="mount /proc")
    return Diagnosis(
        subject="ports",
        verdict="ok" if int(ends[0]) >= EPHEMERAL_PORTS_FROM else "warn",
        found=f"outgoing connections take {'-'.join(ends)}",
        mend=f"sysctl net.ipv4.ip_local_port_range='{EPHEMERAL_PORTS_FROM} 60999'; planned ports lie below",
    )


def prometheus(program: str | None) -> Diagnosis:
    return Diagnosis(
        subject="prometheus",
        verdict="ok" if program else "warn",
        found=program or "not installed; jobs run without being scraped",
        mend="apt-get install prometheus",
    )


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)
