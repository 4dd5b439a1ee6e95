"""Sends a signal to one life of a process, never to whoever got its pid afterwards. Used by `backend`."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress

from deploy.local.process_table import Identity, read_identity

_NO_PIDFD = frozenset({errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENFILE})
"""Old kernels and sandboxes have none, and a process out of descriptors must still be able to end its units."""


def send_signal(target: Identity, number: signal.Signals) -> None:
    """Signal `target` if it still lives. That it is gone, or may not be signalled, is seen at the next look."""
    try:
        descriptor = os.pidfd_open(target.pid)
    except OSError as error:
        if error.errno in _NO_PIDFD and read_identity(target.pid) == target:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(target.pid, number)
        return
    try:
        # The descriptor stands for one process: if that is the target now, it is when the signal is sent.
        if read_identity(target.pid) == target:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
