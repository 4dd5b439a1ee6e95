"""The lines of a reader: kept from load to load, and many slow producers at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from connectors.weights.bounded import Deadline
from connectors.weights.nixl.lines import Address, Lines
from connectors.weights.nixl.messages import QUESTIONS, Attend, Granted, Leave, receive, send
from connectors.weights.source import FetchError

PRODUCERS, SLOW_S, LIMIT_S = 64, 0.25, 8.0
"""One after the other they would take twice the time that there is for all."""


def soon() -> Deadline:
    return Deadline(LIMIT_S, what="opening")


@contextmanager
def slow_producers(count: int, *, silent: int = 0) -> Iterator[tuple[list[Address], threading.Barrier]]:
    """They take their time to answer; some never do. The barrier is through once the readers of all have hung up."""
    hung_up = threading.Barrier(count + 1)

    def converse(listener: socket.socket, *, answers: bool) -> None:
        connection, _ = listener.accept()
        with connection:
            assert receive(connection, QUESTIONS) == Attend()
            if answers:
                threading.Event().wait(SLOW_S)
                send(connection, Granted())
            # Where an answer was not heard, the end comes as a reset.
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        hung_up.wait()

    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        for number, listener in enumerate(listeners):
            arguments = {"answers": number >= silent}
            threading.Thread(target=converse, args=(listener,), kwargs=arguments, daemon=True).start()
        yield [listener.getsockname() for listener in listeners], hung_up


def test_many_slow_producers_take_no_longer_than_one() -> None:
    lines = Lines()
    with slow_producers(PRODUCERS) as (producers, hung_up):
        channels = lines.attend(producers, soon())
        for channel in channels:
            channel.check_alive()
        lines.close()
        hung_up.wait()
    assert len(channels) == PRODUCERS


@pytest.mark.parametrize("silent", [1, 3])
def test_one_that_does_not_answer_fails_all_in_time_and_leaves_no_connection(silent: int) -> None:
    with slow_producers(8, silent=silent) as (producers, hung_up):
        with pytest.raises(FetchError, match="Attend got no answer"):
            Lines().attend(producers, Deadline(6 * SLOW_S, what="opening"))
        hung_up.wait()


def test_no_producer_is_reached_once_the_time_is_over() -> None:
    with pytest.raises(FetchError, match="opening: not done after 0 s"):
        Lines().attend([("127.0.0.1", 1)], Deadline(0, what="opening"))


def test_the_next_load_has_the_same_line_and_a_new_one_after_the_producer_hung_up() -> None:
    lines = Lines()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        producer = listener.getsockname()
        first = lines.to(producer, soon())
        connection, _ = listener.accept()
        lines.leave([producer])
        assert receive(connection, QUESTIONS) == Leave()
        assert lines.to(producer, soon()) is first
        connection.close()
        assert lines.to(producer, soon()) is not first
        lines.close()


def test_a_line_that_owes_an_answer_is_not_used_again() -> None:
    lines = Lines()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        producer = listener.getsockname()
        first = lines.to(producer, soon())
        with pytest.raises(FetchError, match="Attend got no answer"):
            first.ask(Attend(), 0.05)
        assert lines.to(producer, soon()) is not first
        lines.close()


def test_whoever_is_not_read_from_any_more_is_hung_up_on() -> None:
    lines = Lines()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lines.to(listener.getsockname(), soon())
        connection, _ = listener.accept()
        lines.keep_only([])
        with connection:
            assert connection.recv(1) == b""
