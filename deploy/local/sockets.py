"""Which process holds which TCP port, read from the kernel's tables; nothing is ever connected to.

`backend` asks `find_holder` before a start, `deploy.probe` asks `listens` afterwards. The tables are those of
this process's network namespace.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from deploy.local.process_table import Process, all_pids, read_process

_LISTEN = "0A"
_TIME_WAIT = "06"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_OUTGOING_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, kw_only=True)
class SocketEntry:
    """One line of the kernel's TCP tables."""

    port: int
    state: str
    """Two hexadecimal digits, as the kernel numbers TCP states."""
    uid: int
    inode: int
    """0 where no process holds the socket any more."""


@dataclass(frozen=True, kw_only=True)
class PortHolder:
    """Why a port cannot be used, in words for the user."""

    holder: str
    mend: str


def parse_tcp_table(text: str) -> tuple[SocketEntry, ...]:
    """Read /proc/net/tcp or tcp6; both have the same columns."""
    entries = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10:
            continue
        port = int(fields[1].rpartition(":")[2], 16)
        entries.append(SocketEntry(port=port, state=fields[3], uid=int(fields[7]), inode=int(fields[9])))
    return tuple(entries)


def read_sockets() -> tuple[SocketEntry, ...]:
    """All TCP sockets, IPv4 and IPv6, of this network namespace."""
    tables = [parse_tcp_table(table.read_text(encoding="ascii")) for table in _TABLES if table.exists()]
    return tuple(chain.from_iterable(tables))


def listens(port: int, pids: Iterable[int]) -> bool:
    """Whether one of `pids` holds a listening socket on `port`, on any address."""
    inodes = {entry.inode for entry in read_sockets() if entry.port == port and entry.state == _LISTEN}
    return bool(inodes) and any(_held_by(pid) & inodes for pid in pids)


def find_holder(port: int, sockets: Iterable[SocketEntry], *, setting: str = "") -> PortHolder | None:
    """What keeps a server from taking `port` on any address, or None if it is free.

    `sockets` are those of `read_sockets`, read once for many ports: on a busy node the tables are long.
    `setting` is the field that moves the port, for the mend.
    """
    entries = [entry for entry in sockets if entry.port == port]
    listening = [entry for entry in entries if entry.state == _LISTEN]
    if listening:
        return PortHolder(holder=_owner(listening), mend=_free_it(setting))
    if _can_bind(port):
        return None
    return _holder_of_unlistened(entries, setting)


def _free_it(setting: str) -> str:
    return f"free it or choose another port ({setting})" if setting else "free it or choose another port"


def _holder_of_unlistened(entries: list[SocketEntry], setting: str) -> PortHolder:
    where = f" ({setting})" if setting else ""
    held = [entry for entry in entries if entry.inode]
    if held:
        lowest, _ = _OUTGOING_RANGE.read_text(encoding="ascii").split()
        return PortHolder(
            holder=f"a connection of {_owner(held)}",
            mend=f"free it or choose a port below {lowest}{where}, where no outgoing connection is put",
        )
    if any(entry.state == _TIME_WAIT for entry in entries):
        return PortHolder(
            holder="a connection that was closed just now", mend=f"wait a minute or choose another port{where}"
        )
    return PortHolder(holder="a process that has bound it and does not listen yet", mend=_free_it(setting))


def _can_bind(port: int) -> bool:
    """Whether a server could bind `port` now: also an outgoing connection or a socket not yet listening is in the way.

    SO_REUSEADDR is set as servers set it, so that the remains of a server's old connections do not count.
    """
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as attempt:
                attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    attempt.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                attempt.bind((address, port))
        except OSError as error:
            # Any other error (no IPv6 here, a port for root only) does not mean that someone holds the port.
            if error.errno == errno.EADDRINUSE:
                return False
    return True


def _owner(entries: list[SocketEntry]) -> str:
    inodes = {entry.inode for entry in entries}
    for pid in sorted(all_pids()):
        if _held_by(pid) & inodes:
            process = read_process(pid)
            if process is not None:
                return _described(process)
    return f"a process of user {entries[0].uid} that cannot be read from here"


def _described(process: Process) -> str:
    marker = process.marker
    unit = f", {marker.unit} of run {marker.run_id}" if marker else ""
    return f"{process.comm} (pid {process.identity.pid}{unit})"


def _held_by(pid: int) -> Set[int]:
    """Inodes of the sockets that a process has open; none if it is gone or may not be read."""
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = _link_target(descriptor)
            if target.startswith("socket:["):
                inodes.add(int(target[len("socket:[") : -1]))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return frozenset()
    return inodes


def _link_target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        # Closed between listing and reading.
        return ""
