"""Who holds a port: the answers for holders that cannot be read or that do not listen."""

from __future__ import annotations

import socket

from deploy.local.sockets import PortHolder, SocketEntry, find_holder

UNOWNED_INODE = 1 << 60
FREE_IT = "free it or choose another port"


def test_a_listener_that_cannot_be_read_is_named_by_its_user(free_port):
    entry = SocketEntry(port=free_port, state="0A", uid=1234, inode=UNOWNED_INODE)
    expected = PortHolder(holder="a process of user 1234 that cannot be read from here", mend=FREE_IT)
    assert find_holder(free_port, [entry]) == expected


def test_a_closed_connection_in_the_way_passes_by_itself(free_port):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        remains = SocketEntry(port=free_port, state="06", uid=0, inode=0)
        assert find_holder(free_port, [remains]) == PortHolder(
            holder="a connection that was closed just now", mend="wait a minute or choose another port"
        )


def test_sockets_of_other_ports_do_not_matter(free_port):
    entry = SocketEntry(port=free_port + 1, state="0A", uid=0, inode=UNOWNED_INODE)
    assert find_holder(free_port, [entry]) is None


def test_the_field_that_moves_the_port_is_named(free_port):
    entry = SocketEntry(port=free_port, state="0A", uid=1234, inode=UNOWNED_INODE)
    found = find_holder(free_port, [entry], setting="ports.base")
    assert found is not None
    assert found.mend == "free it or choose another port (ports.base)"
