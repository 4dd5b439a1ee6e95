"""Looks at this machine and says what keeps a job from running here, each finding with the command that mends it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from connectors.abilities import EngineNotFound, ask
from connectors.types import EngineAbilities
from orchestrator.observe.machine import this_machine

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
}
"""What Mooncake's programs load, even for tcp, and the Debian package of each."""

GIB = 2**30
FILES_NEEDED = 4096
DISK_NEEDED_GIB = 2
SHM_NEEDED_GIB = 1
PACKAGES = ("fastapi", "aiohttp", "pydantic", "prometheus-client", "httpx")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    subject: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def diagnose(python: str, home: Path) -> list[Diagnosis]:
    """Everything that is looked at, in the order shown."""
    return [*_machine(), *_libraries(), *_limits(), *_space(home), *_packages(), *_engine(python), *_ports()]


def _machine() -> Iterator[Diagnosis]:
    node = this_machine()
    system = platform.system()
    yield Diagnosis(
        subject="system",
        verdict="ok" if system == "Linux" else "fail",
        found=f"{system} {platform.release()} on {platform.machine()}, Python {platform.python_version()}",
        mend="Headrace runs on Linux",
    )
    memory = f"{node.memory_bytes / GIB:.0f} GiB"
    yield Diagnosis(
        subject="cpu and memory",
        verdict="ok" if len(node.cores) > 1 else "warn",
        found=f"{len(node.cores)} cores, {memory}",
        mend="two CPU engines on one core wait for each other; use two cores or more",
    )
    nvlink = {True: ", NVLink between all", False: ", no NVLink between all", None: ""}[node.nvlink]
    found = f"{node.gpus}{nvlink}" if node.gpus else "none seen by nvidia-smi; CPU engines only"
    yield Diagnosis(subject="gpus", verdict="ok", found=found)


def _libraries() -> Iterator[Diagnosis]:
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError as error:
            mend = f"apt-get install {package}"
            yield Diagnosis(subject=library, verdict="fail", found=f"cannot be loaded: {error}", mend=mend)
        else:
            yield Diagnosis(subject=library, verdict="ok", found="present")


def _limits() -> Iterator[Diagnosis]:
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Diagnosis(
        subject="open files",
        verdict="ok" if files >= FILES_NEEDED else "warn",
        found=f"limit {_limit(files)} (hard {_limit(files_hard)})",
        mend=f"ulimit -n {FILES_NEEDED} before starting; every open request takes two",
    )
    locked, locked_hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    yield Diagnosis(
        subject="locked memory",
        verdict="ok" if unlimited else "warn",
        found=f"limit {_limit(locked)} (hard {_limit(locked_hard)})",
        mend="ulimit -l unlimited; RDMA registers memory by locking it (tcp does without)",
    )


def _space(home: Path) -> Iterator[Diagnosis]:
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    for subject, folder, needed in (
        ("state folder", existing, DISK_NEEDED_GIB),
        ("/dev/shm", Path("/dev/shm"), SHM_NEEDED_GIB),
    ):
        free = shutil.disk_usage(folder).free / GIB
        yield Diagnosis(
            subject=subject,
            verdict="ok" if free >= needed else "warn",
            found=f"{free:.1f} GiB free in {folder}",
            mend=f"free {needed} GiB there" + (", or set HEADRACE_HOME" if subject == "state folder" else ""),
        )
    writable = os.access(existing, os.W_OK)
    if not writable:
        yield Diagnosis(
            subject="state folder", verdict="fail", found=f"{existing} is read-only", mend="set HEADRACE_HOME"
        )


def _packages() -> Iterator[Diagnosis]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    yield Diagnosis(subject="control plane", verdict="ok", found=f"{sys.executable}: {versions}")


def _engine(python: str) -> Iterator[Diagnosis]:
    try:
        abilities = ask(python)
    except EngineNotFound as error:
        mend = "make stack (CPU), or pip install 'headrace[gpu]' (GPU)"
        yield Diagnosis(subject="engine stack", verdict="fail", found=str(error), mend=mend)
        return
    yield Diagnosis(subject="vllm", verdict="ok", found=f"{abilities.vllm_version} ({abilities.platform}) in {python}")
    yield from _engine_parts(abilities)
    if abilities.platform == "cuda" and not this_machine().gpus:
        found = "vLLM for CUDA, and no GPU is seen"
        yield Diagnosis(subject="gpus", verdict="fail", found=found, mend="check the driver with nvidia-smi")


def _engine_parts(abilities: EngineAbilities) -> Iterator[Diagnosis]:
    for subject, version, package in (
        ("nixl", abilities.nixl_version, "nixl"),
        ("mooncake", abilities.mooncake_version, "mooncake-transfer-engine"),
    ):
        yield Diagnosis(
            subject=subject,
            verdict="ok" if version else "fail",
            found=version or "not installed",
            mend=f"pip install {package}, in {abilities.python}",
        )
    missing = [name for name, can in (("saving of decode blocks", abilities.save_decode_cache),) if not can]
    if missing:
        found = f"vLLM {abilities.vllm_version} lacks {', '.join(missing)}"
        yield Diagnosis(subject="abilities", verdict="warn", found=found, mend="install vLLM 0.32")


def _ports() -> Iterator[Diagnosis]:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    low = int(text.split()[0])
    yield Diagnosis(
        subject="ports",
        verdict="ok" if low >= 32768 else "warn",
        found=f"outgoing connections take {'-'.join(text.split())}",
        mend="sysctl net.ipv4.ip_local_port_range='32768 60999'; planned ports lie below",
    )
    prometheus = shutil.which("prometheus")
    yield Diagnosis(
        subject="prometheus",
        verdict="ok" if prometheus else "warn",
        found=prometheus or "not installed; jobs run without being scraped",
        mend="apt-get install prometheus",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
