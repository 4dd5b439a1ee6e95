"""The state folder: which one it is, and whether a database can be kept there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import HeadraceError

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.glusterfs",
        "fuse.juicefs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)
"""As the kernel names them in /proc/self/mountinfo."""
_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


class StateUnusable(HeadraceError):
    """The state folder, or a file in it, cannot be read or written: the user mends it or names another folder."""

    def __init__(self, path: Path, cause: object, mend: str = "make the folder readable and writable") -> None:
        super().__init__(f"the state in {path} cannot be used: {cause}; {mend}, or set HEADRACE_HOME to another one")


@dataclass(frozen=True, kw_only=True)
class Mount:
    point: str
    kind: str
    """Of its file system, as the kernel names it."""


def home_folder() -> Path:
    """HEADRACE_HOME, else the XDG state folder."""
    named = os.environ.get("HEADRACE_HOME")
    if named:
        return Path(named).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "headrace"


def refuse_network_file_system(home: Path) -> None:
    """A write-ahead log lives in memory that its readers share, and the locks of a job in the kernel of its machine:
    a file server keeps neither, and says so of neither.

    Raises:
        StateUnusable: the folder lies on one.
    """
    mount = mount_of(home.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    if mount is not None and mount.kind in NETWORK_FILE_SYSTEMS:
        cause = f"{mount.point} is a network file system ({mount.kind}), which keeps no locks and no shared memory"
        raise StateUnusable(home, cause, mend="keep it on a disk of this machine")


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that a resolved path lies on; proc(5) has the format. None where the text names none."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = Mount(point=_plain(before.split()[4]), kind=after.split()[0])
        # Of two mounts at one point the later one hides the other.
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _plain(escaped: str) -> str:
    for escape, character in _ESCAPES.items():
        escaped = escaped.replace(escape, character)
    return escaped
