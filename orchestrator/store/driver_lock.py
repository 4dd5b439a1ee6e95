"""One driver per job: whoever brings it up or ends it holds this lock.

The kernel releases it when that process dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

RETRY_EVERY_S = 0.1


class DriverLock:
    """An advisory lock on a file in the job's folder."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "driver.lock"
        self._fd: int | None = None

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Whether the lock was had within `wait_s` seconds."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(RETRY_EVERY_S)
            else:
                self._fd = fd
                return True

    def held_by_anyone(self) -> bool:
        """Whether some process drives the job right now."""
        if not self._path.exists():
            return False
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        """Give it back; nothing happens where it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
