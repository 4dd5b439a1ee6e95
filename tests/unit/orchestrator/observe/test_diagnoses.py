"""What a find on a machine means, and what mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.observe import diagnoses
from orchestrator.observe.diagnoses import GIB, LIBRARIES, Diagnosis
from orchestrator.observe.doctor import diagnose
from tests.unit.orchestrator.samples import CPU, GPU, node

SHM = Path("/dev/shm")
HOME = Path("/home/u")


@pytest.mark.parametrize(
    ("found", "verdict", "says"),
    [
        (diagnoses.system("Linux", "6.1 on x86_64"), "ok", "Linux 6.1"),
        (diagnoses.system("Darwin", "24 on arm64"), "fail", "run Headrace on Linux"),
        (diagnoses.cores_and_memory(node(cores=2)), "ok", "2 cores, 24 GiB"),
        (diagnoses.cores_and_memory(node(cores=1)), "warn", "use two cores or more"),
        (diagnoses.cores_and_memory(node(gib=0)), "warn", "mount /proc"),
        (diagnoses.gpus(node(), "cpu"), "ok", "CPU engines only"),
        (diagnoses.gpus(node(), None), "ok", "CPU engines only"),
        (diagnoses.gpus(node(), "cuda"), "fail", "check the driver with nvidia-smi"),
        (diagnoses.gpus(node(gpus=1), "cuda"), "ok", "1"),
        (diagnoses.gpus(replace(node(gpus=8), nvlink=True), "cuda"), "ok", "8, NVLink between all"),
        (diagnoses.gpus(replace(node(gpus=8), nvlink=False), "cuda"), "ok", "no NVLink"),
        (diagnoses.gpus(node(gpus=8), "cuda"), "ok", "links unknown"),
        (diagnoses.library("libnuma.so.1", None), "ok", "present"),
        (diagnoses.library("liburing.so.2", "no such file"), "warn", "apt-get install liburing2"),
        (diagnoses.open_files(1024, 4096), "warn", "ulimit -n 4096"),
        (diagnoses.open_files(4096, None), "ok", "limit 4096 (hard unlimited)"),
        (diagnoses.open_files(None, None), "ok", "unlimited"),
        (diagnoses.locked_memory(65536, 65536), "warn", "ulimit -l unlimited"),
        (diagnoses.locked_memory(None, None), "ok", "unlimited"),
        (diagnoses.state_folder(HOME, 9 * GIB, writable=True), "ok", "9.0 GiB free in /home/u"),
        (diagnoses.state_folder(HOME, GIB, writable=True), "warn", "free 2 GiB there, or set HEADRACE_HOME"),
        (diagnoses.state_folder(HOME, 9 * GIB, writable=False), "fail", "cannot be written"),
        (diagnoses.state_folder(HOME, None, writable=True), "fail", "HEADRACE_HOME"),
        (diagnoses.shared_memory(SHM, 2 * GIB), "ok", "2.0 GiB free"),
        (diagnoses.shared_memory(SHM, GIB // 16), "warn", "--shm-size"),
        (diagnoses.shared_memory(SHM, None), "fail", "mount -t tmpfs"),
        (diagnoses.control_plane("py", {"httpx": "1", "fastapi": "2"}), "ok", "py: httpx 1, fastapi 2"),
        (diagnoses.control_plane("py", {"httpx": None, "fastapi": "2"}), "fail", "py -m pip install httpx"),
        (diagnoses.engine_missing("py has no vllm installed"), "fail", "make stack"),
        (diagnoses.outgoing_ports("32768\t60999\n"), "ok", "32768-60999"),
        (diagnoses.outgoing_ports("9000\t65000\n"), "warn", "sysctl net.ipv4.ip_local_port_range"),
        (diagnoses.outgoing_ports(""), "warn", "cannot be read"),
        (diagnoses.prometheus("/usr/bin/prometheus"), "ok", "/usr/bin/prometheus"),
        (diagnoses.prometheus(None), "warn", "apt-get install prometheus"),
    ],
)
def test_diagnoses(found: Diagnosis, verdict: str, says: str) -> None:
    assert found.verdict == verdict
    assert says in f"{found.found} {found.mend}"
    assert found.mend or found.verdict == "ok"


def test_the_engine_stack() -> None:
    assert {one.subject: one.verdict for one in diagnoses.engine_stack(CPU)} == {
        "vllm": "ok",
        "nixl": "ok",
        "mooncake": "ok",
    }
    poor = replace(GPU, nixl_version=None, mooncake_version=None, save_decode_cache=False)
    found = {one.subject: one for one in diagnoses.engine_stack(poor)}
    assert {subject: one.verdict for subject, one in found.items()} == {
        "vllm": "ok",
        "nixl": "fail",
        "mooncake": "fail",
        "abilities": "warn",
    }
    assert found["mooncake"].mend == "/venv/bin/python -m pip install mooncake-transfer-engine"


def test_a_machine_is_looked_at_as_a_whole(tmp_path: Path) -> None:
    """Whatever this machine is: everything is said once, and the state folder need not be there."""
    found = diagnose("/no/such/python", tmp_path / "not" / "yet")
    subjects = [one.subject for one in found]
    assert len(set(subjects)) == len(subjects)
    assert {"system", "state folder", "engine stack", "ports", *LIBRARIES} <= set(subjects)
    by_subject = {one.subject: one for one in found}
    assert by_subject["engine stack"].verdict == "fail"
    assert str(tmp_path) in by_subject["state folder"].found
