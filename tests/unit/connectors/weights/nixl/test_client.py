"""A connection to a producer: whether it lives, seen without asking."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from connectors.weights.nixl.client import Channel
from connectors.weights.source import FetchError

MANY = 1100
"""More than `select` knows."""


def test_a_producer_that_hung_up_is_gone_however_many_files_are_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * MANY), limits[1]))
    try:
        with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(MANY):
                stack.enter_context(Path("/dev/null").open("rb"))
            channel = Channel("127.0.0.1", listener.getsockname()[1], 5.0)
            stack.callback(channel.close)
            connection, _ = listener.accept()
            channel.check_alive()
            connection.close()
            with pytest.raises(FetchError, match="is gone"):
                channel.check_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
