"""Where a reply ends, and whether the connection can be used after it."""

from __future__ import annotations

import pytest

from router.io.http1.reply_reader import BrokenReplyError, ReplyReader

OK = b"HTTP/1.1 200 OK\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "body", "reusable"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", b"abc", True),
        (OK + b"Content-Length: 0\r\n\r\n", b"", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nT: r\r\n\r\n", b"abcde", True),
        (INTERIM + OK + b"Content-Length: 1\r\n\r\na", b"a", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", True),
        (OK + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc", b"abc", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc", False),
        (OK + b"Content-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nxy", b"abc", False),
        (OK + b"Content-Length: 3\r\n\r\nabcd", b"abc", False),
    ],
)  # fmt: skip
def test_a_whole_reply(raw: bytes, body: bytes, reusable: bool) -> None:
    reader = ReplyReader()
    reader.feed(raw)
    assert (reader.complete, b"".join(reader.pieces), reader.reusable) == (True, body, reusable)


def test_one_connection_reads_reply_after_reply() -> None:
    reader = ReplyReader()
    for number in range(3):
        reader.expect()
        for each in OK + b"X-N: %d\r\nContent-Length: 1\r\n\r\n%d" % (number, number):
            assert not reader.complete
            reader.feed(bytes([each]))
        assert reader.complete
        assert (reader.status, reader.reply_headers) == (200, {b"x-n": b"%d" % number, b"content-length": b"1"})
        assert reader.pieces == [b"%d" % number]
        reader.pieces.clear()


def test_trailers_and_interim_replies_leave_the_head_alone() -> None:
    reader = ReplyReader()
    reader.feed(b"HTTP/1.1 100 Continue\r\nA: 1\r\n\r\n" + OK + b"B: 2\r\nTransfer-Encoding: chunked\r\n\r\n")
    head = (reader.status, reader.reply_headers)
    reader.feed(b"0\r\nB: 3\r\n\r\n")
    assert head == (reader.status, reader.reply_headers) == (200, {b"b": b"2", b"transfer-encoding": b"chunked"})


@pytest.mark.parametrize("length", [b"", b"Transfer-Encoding: gzip\r\n"])
def test_a_reply_without_a_length_ends_with_its_connection(length: bytes) -> None:
    reader = ReplyReader()
    reader.feed(OK + length + b"\r\nabc")
    assert (reader.until_close, reader.complete, reader.reusable) == (True, False, False)
    reader.feed(b"HTTP/1.1 200 OK\r\n\r\n")
    assert b"".join(reader.pieces) == b"abcHTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense",
        b"HTTP/1.1 20 OK\r\n\r\n",
        OK + b"Content-Length: x\r\n\r\n",
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nz\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
def test_what_is_not_a_reply(raw: bytes) -> None:
    with pytest.raises(BrokenReplyError):
        ReplyReader().feed(raw)
