"""One control plane per state folder. One driver per job, and one coordinator: whoever brings it up or ends it, and
whoever updates its weights.

The kernel releases a lock when its process dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import ClassVar

from orchestrator.errors import HeadraceError
from orchestrator.store.home import StateUnusable

RETRY_EVERY_S = 0.1
LOOKS_PASS_S = 1.0
"""Whoever asks whether a control plane runs has the lock for a moment."""


class StateInUse(HeadraceError):
    """Another control plane has the state folder."""


class FolderLock:
    """An advisory lock on a file in a folder: a job's, or the state folder."""

    file_name: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.file_name
        self._fd: int | None = None

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Whether the lock was had within `wait_s` seconds.

        Raises:
            StateUnusable: the job's folder takes no lock file.
        """
        assert self._fd is None, "a lock that is held is not asked for again"
        fd = self._open_file()
        deadline = time.monotonic() + wait_s
        try:
            while not self._try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(RETRY_EVERY_S)
            self._fd = fd
            return True
        finally:
            if self._fd is None:
                os.close(fd)

    def held_by_anyone(self) -> bool:
        """Whether some process holds it right now."""
        if not self._path.exists():
            return False
        fd = self._open_file()
        try:
            return not self._try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give it back; nothing happens where it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open_file(self) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateUnusable(self._path, error.strerror or error) from error

    def _try_lock(self, fd: int, kind: int) -> bool:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StateUnusable(self._path, f"no lock can be had there ({error.strerror or error})") from error
        return True


class DriverLock(FolderLock):
    """Of whoever brings the job up, ends it, or starts a process of it again."""

    file_name = "driver.lock"


class CoordinatorLock(FolderLock):
    """Of whoever supervises the running job: restarts its engines, and brings them to their weights and epoch."""

    file_name = "coordinator.lock"


class ControlPlaneLock(FolderLock):
    """Of the one `headrace serve` of a state folder."""

    file_name = "control-plane.lock"

    def take(self) -> None:
        """For as long as the process lives.

        Raises:
            StateInUse: another process has it.
        """
        if not self.acquire(wait_s=LOOKS_PASS_S):
            mend = "stop that one, or set HEADRACE_HOME to another folder"
            raise StateInUse(f"another control plane (pid {self.holder()}) runs on {self._path.parent}; {mend}")
        self._path.write_text(f"{os.getpid()}\n", encoding="ascii")

    def holder(self) -> str:
        """The pid of the process that has it, or had it last."""
        return self._path.read_text(encoding="ascii").strip() or "unknown"
