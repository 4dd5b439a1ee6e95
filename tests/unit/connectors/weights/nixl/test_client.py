"""Connections to producers: whether one lives, seen without asking it, and many slow ones at once."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from connectors.weights.bounded import Deadline
from connectors.weights.nixl.client import Channel, attend
from connectors.weights.nixl.messages import QUESTIONS, Attend, Granted, Producer, receive, send
from connectors.weights.source import FetchError

MANY = 1100
"""More than `select` knows."""
PRODUCERS, SLOW_S, LIMIT_S = 64, 0.25, 8.0
"""One after the other they would take twice the time that there is for all."""


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


@contextmanager
def slow_producers(count: int, *, silent: int = 0) -> Iterator[tuple[list[Producer], threading.Barrier]]:
    """They take their time to answer; some never do. The barrier is through once the readers of all have hung up."""
    hung_up = threading.Barrier(count + 1)
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:

        def converse(connection: socket.socket, *, answers: bool) -> None:
            with connection:
                assert receive(connection, QUESTIONS) == Attend()
                if answers:
                    threading.Event().wait(SLOW_S)
                    send(connection, Granted())
                assert connection.recv(1) == b""
            hung_up.wait()

        def listen() -> None:
            for number in range(count):
                connection, _ = listener.accept()
                answers = number >= silent
                threading.Thread(target=converse, args=(connection,), kwargs={"answers": answers}, daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        yield [Producer(*listener.getsockname(), f"agent-{number}", b"", ()) for number in range(count)], hung_up


def test_many_slow_producers_take_no_longer_than_one() -> None:
    with slow_producers(PRODUCERS) as (producers, hung_up):
        channels = attend(producers, Deadline(LIMIT_S, what="opening"))
        for channel in channels:
            channel.check_alive()
            channel.close()
        hung_up.wait()
    assert len(channels) == PRODUCERS


@pytest.mark.parametrize("silent", [1, 3])
def test_one_that_does_not_answer_fails_all_in_time_and_leaves_no_connection(silent: int) -> None:
    with slow_producers(8, silent=silent) as (producers, hung_up):
        with pytest.raises(FetchError, match="Attend got no answer") as failure:
            attend(producers, Deadline(6 * SLOW_S, what="opening"))
        hung_up.wait()
    assert ("and 2 more" in str(failure.value)) == (silent == 3)


def test_no_producer_is_reached_once_the_time_is_over() -> None:
    with pytest.raises(FetchError, match="opening: not done after 0 s"):
        attend([Producer("127.0.0.1", 1, "agent", b"", ())], Deadline(0, what="opening"))
