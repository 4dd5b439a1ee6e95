"""What a load took: figures per group and in total, as data for the wire, and this process's peak memory.

`load.py` makes them, `verdict.py` carries them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(slots=True)
class GroupNumbers:
    """Of one group of a load plan."""

    name: str
    bytes: int
    seconds: float
    wait_s: float
    """For the source."""
    transfer_s: float
    copy_s: float
    """From staging tensors into parameters of another dtype."""
    process_s: float
    """Of modules whose weights are packed and the like: vLLM's fresh memory for them, and its work on it."""


@dataclass(slots=True)
class LoadNumbers:
    """Of one load on one rank."""

    groups: list[GroupNumbers] = field(default_factory=list)
    seconds: float = 0.0
    open_s: float = 0.0
    """Until the version was open, the load plan included."""
    plan_s: float = 0.0
    """Of that, for the load plan: recording it, or seeing that it is still right."""
    prefetch_wait_s: float = 0.0
    """For a prefetch that had not ended when the load began."""
    agree_s: float = 0.0
    """For the other ranks."""
    by_producer: dict[str, int] = field(default_factory=dict)
    peak_extra_bytes: int | None = None
    """Of this process's memory, above what it was before; None where the kernel does not tell."""
    peak_extra_device_bytes: int | None = None
    """Of the GPU's; None where there is none."""

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)

    def total(self, part: str) -> float:
        """Sum of one figure over the groups."""
        return sum(float(getattr(group, part)) for group in self.groups)


class PeakMemory:
    """Peak of this process's resident memory, pinned memory included, since it was made."""

    def __init__(self) -> None:
        # 5: start the kernel's high-water mark anew.
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")
        self._before = _status_bytes("VmRSS")

    def extra_bytes(self) -> int | None:
        peak = _status_bytes("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)


def _status_bytes(field_name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    return None
