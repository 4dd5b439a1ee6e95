"""Which folder the state lies in, and on which file systems it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.store import home
from orchestrator.store.database import Database
from orchestrator.store.home import NETWORK_FILE_SYSTEMS, Mount, StateUnusable, home_folder, mount_of

MOUNTINFO = r"""
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
25 24 0:22 / /home rw shared:2 master:7 - nfs4 server:/home rw,vers=4.2
26 24 0:23 / /home/u/local\040disk rw - xfs /dev/sdb1 rw
27 24 0:24 / /data rw - ext4 /dev/sdc1 rw
28 24 0:25 / /data rw - fuse.sshfs host:/data rw
29 24 0:26 / /mnt rw - lustre mds@tcp:/scratch rw
""".strip()


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/home/u/.local/state/headrace", "/home", "nfs4"),
        ("/home/u/local disk/headrace", "/home/u/local disk", "xfs"),
        ("/homes", "/", "ext4"),
        ("/data/headrace", "/data", "fuse.sshfs"),
        ("/mnt", "/mnt", "lustre"),
    ],
)
def test_the_innermost_and_last_mount_is_what_a_path_lies_on(path: str, point: str, kind: str) -> None:
    assert mount_of(Path(path), MOUNTINFO) == Mount(point=point, kind=kind)


def test_what_databases_cannot_be_kept_on_is_known_by_the_kernels_names() -> None:
    assert {"nfs", "nfs4", "cifs", "lustre", "gpfs", "fuse.sshfs", "9p"} <= NETWORK_FILE_SYSTEMS
    assert NETWORK_FILE_SYSTEMS.isdisjoint({"ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs"})


def test_a_state_folder_on_one_is_refused_with_the_reason_and_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This disk is called one for the while."""
    mount = mount_of(tmp_path.resolve(), Path("/proc/self/mountinfo").read_text())
    assert mount is not None
    monkeypatch.setattr(home, "NETWORK_FILE_SYSTEMS", frozenset([mount.kind]))
    says = rf"network file system \({mount.kind}\).*disk of this machine, or set HEADRACE_HOME"
    with pytest.raises(StateUnusable, match=says):
        Database(tmp_path / "state")
    assert [*(tmp_path / "state").iterdir()] == []


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HEADRACE_HOME": "/data/headrace"}, "/data/headrace"),
        ({"HEADRACE_HOME": "", "XDG_STATE_HOME": "/state"}, "/state/headrace"),
        ({"HOME": "/home/u"}, "/home/u/.local/state/headrace"),
    ],
)
def test_home_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("HEADRACE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert home_folder() == Path(folder)
