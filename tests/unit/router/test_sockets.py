from __future__ import annotations

import socket

from router.io.sockets import GONE_AFTER_S, open_socket


def test_the_kernel_asks_whether_a_silent_peer_is_there() -> None:
    with open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == GONE_AFTER_S * 1000
        if hasattr(socket, "TCP_KEEPIDLE"):
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, interval, count = (made.getsockopt(socket.IPPROTO_TCP, name) for name in names)
            assert idle + interval * count == GONE_AFTER_S
