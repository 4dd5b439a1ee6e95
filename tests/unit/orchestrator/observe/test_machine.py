"""What the kernel and nvidia-smi say, on recorded text."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.observe.machine import (
    computes_bf16,
    first_outgoing_port,
    memory_bytes,
    memory_limit,
    memory_limit_files,
    read_or_nothing,
    sees_nvlink,
    this_machine,
    visible_gpus,
)

V2 = "0::/user.slice/user-1000.slice/session-3.scope\n"
V1 = """\
9:name=systemd:/
8:pids:/
4:memory:/jobs/f13f459b
2:cpuacct:/
0::/
"""
V1_TOGETHER = "6:cpu,memory:/a:b\n"

GPUS = """\
GPU 0: NVIDIA H200 (UUID: GPU-1a2b3c4d-0000-1111-2222-333344445555)
GPU 1: NVIDIA H200 (UUID: GPU-9f8e7d6c-0000-1111-2222-333344445555)
  MIG 1g.18gb     Device  0: (UUID: MIG-77777777-0000-1111-2222-333344445555)
GPU 2: NVIDIA H200 (UUID: GPU-55555555-0000-1111-2222-333344445555)
"""

AVX2 = "processor\t: 0\nflags\t\t: fpu sse sse2 avx avx2 fma\n"


MEMINFO = "MemTotal:       24594188 kB\nMemFree:         1234 kB\n"

TWO_JOINED = """\
\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\t0-47\t0\t\tN/A
GPU1\tNV18\t X \t0-47\t0\t\tN/A

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_memory_of_the_machine() -> None:
    assert memory_bytes(MEMINFO) == 24594188 * 1024
    assert memory_bytes("") == 0


@pytest.mark.parametrize(
    ("topology", "joined"),
    [
        (TWO_JOINED, True),
        (TWO_JOINED.replace("NV18", "SYS"), False),
        (TWO_JOINED.replace("NV18\t X", "PHB\t X"), False),
        (TWO_JOINED.replace("\x1b[4m", "").replace("\x1b[0m", ""), True),
        ("", None),
    ],
)
def test_nvlink_between_all_pairs(topology: str, joined: bool | None) -> None:
    assert sees_nvlink(topology) is joined


def test_a_file_of_the_kernels_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_or_nothing(tmp_path / "absent") == read_or_nothing(tmp_path) == ""
    (tmp_path / "odd").write_bytes(b"a\xffb")
    assert read_or_nothing(tmp_path / "odd").startswith("a")


def test_this_machine_hands_out_what_the_environment_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = this_machine()
    assert (found.gpus, found.gpu_ids) == (0, ())
    assert found.cores
    assert 0 < found.memory_bytes <= memory_bytes(read_or_nothing(Path("/proc/meminfo")))


def test_cgroup_v2_limits_of_a_group_and_those_above_it() -> None:
    assert memory_limit_files(V2) == (
        "user.slice/user-1000.slice/session-3.scope/memory.max",
        "user.slice/user-1000.slice/memory.max",
        "user.slice/memory.max",
        "memory.max",
    )


def test_cgroup_v1_limits_lie_below_their_controller() -> None:
    assert memory_limit_files(V1) == (
        "memory/jobs/f13f459b/memory.limit_in_bytes",
        "memory/jobs/memory.limit_in_bytes",
        "memory/memory.limit_in_bytes",
        "memory.max",
    )
    assert memory_limit_files(V1_TOGETHER)[0] == "memory/a:b/memory.limit_in_bytes"
    assert memory_limit_files("") == ()


@pytest.mark.parametrize(
    ("text", "limit"),
    [("8589934592\n", 8589934592), ("max\n", None), ("9223372036854771712\n", None), ("", None), ("-1\n", None)],
)
def test_a_limit_of_memory(text: str, limit: int | None) -> None:
    assert memory_limit(text) == limit


@pytest.mark.parametrize(
    ("named", "ids"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        (" 1 , 2", ("1", "2")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,7,1", ("0",)),
        ("0,0", ("0",)),
        ("GPU-9f8e7d6c-0000-1111-2222-333344445555", ("GPU-9f8e7d6c-0000-1111-2222-333344445555",)),
        ("GPU-9f8e", ("GPU-9f8e",)),
        ("GPU-beef", ()),
        ("MIG-77777777-0000-1111-2222-333344445555", ("MIG-77777777-0000-1111-2222-333344445555",)),
    ],
)
def test_gpus_that_the_launching_environment_leaves(named: str | None, ids: tuple[str, ...]) -> None:
    assert visible_gpus(GPUS, named) == ids


def test_no_gpu_at_all() -> None:
    assert visible_gpus("", None) == visible_gpus("", "0") == ()


@pytest.mark.parametrize(
    ("cpuinfo", "bf16"),
    [
        (AVX2, False),
        (AVX2.replace("fma", "fma avx512f avx512_bf16"), True),
        (AVX2.replace("fma", "fma amx_bf16 amx_tile"), True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_bfloat16_of_the_cpu(cpuinfo: str, bf16: bool) -> None:
    assert computes_bf16(cpuinfo) is bf16


def test_where_outgoing_connections_begin() -> None:
    assert first_outgoing_port("9000\t65000\n") == 9000
    assert first_outgoing_port("") == 32768
