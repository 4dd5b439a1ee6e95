"""One driver per job, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.store.home import StateUnusable
from orchestrator.store.locks import ControlPlaneLock, DriverLock, StateInUse

HOLD = """
import sys, time
from pathlib import Path
from orchestrator.store.locks import DriverLock
assert DriverLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_driver_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    first, second = DriverLock(tmp_path / "job"), DriverLock(tmp_path / "job")
    assert first.acquire()
    assert not second.acquire()
    assert not second.acquire(wait_s=0.15)
    assert second.held_by_anyone()
    first.release()
    first.release()
    assert not second.held_by_anyone()
    assert second.acquire()


def test_looking_takes_nothing_away(tmp_path: Path) -> None:
    lock = DriverLock(tmp_path / "job")
    assert not lock.held_by_anyone()
    assert not (tmp_path / "job").exists()
    assert lock.acquire()
    assert lock.held_by_anyone()
    lock.release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    repository = Path(__file__).parents[4]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = DriverLock(tmp_path)
        assert lock.held_by_anyone()
        assert not lock.acquire()
        holder.kill()
        holder.wait()
        assert not lock.held_by_anyone()
        assert lock.acquire()
    lock.release()


def test_a_folder_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file where a folder belongs")
    with pytest.raises(StateUnusable, match=r"driver\.lock cannot be used"):
        DriverLock(tmp_path / "job").acquire()


def test_a_second_control_plane_is_told_of_the_first(tmp_path: Path) -> None:
    first = ControlPlaneLock(tmp_path)
    first.take()
    with pytest.raises(StateInUse, match=rf"pid {os.getpid()}\) runs on {tmp_path}; .*HEADRACE_HOME"):
        ControlPlaneLock(tmp_path).take()
    first.release()
    ControlPlaneLock(tmp_path).take()
