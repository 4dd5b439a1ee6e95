"""A request comes out the same however its bytes are cut, and what is not one clear request is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.io.http1.message import Limits, RefusedError, Request
from router.io.http1.request_reader import RequestReader

LIMITS = Limits(max_body_bytes=1000, max_header_bytes=500, header_timeout_s=1.0, body_timeout_s=1.0, idle_timeout_s=1.0)
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
CODING = b"Transfer-Encoding: chunked\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: h\r\n" + CODING
REQUESTS = {
    b"GET /a?b=c HTTP/1.1\r\nHost: h\r\nX: 1\r\nx: 2\r\n\r\n": ("GET", "/a", "b=c", b""),
    b"\r\n\r\n" + POST + b"Content-Length: 8\r\n\r\nab\r\n\r\ncd": ("POST", "/", "", b"ab\r\n\r\ncd"),
    b"POST /p HTTP/1.0\r\nContent-Length: 0\r\n\r\n": ("POST", "/p", "", b""),
    CHUNKED + b"4;x=y\r\n\r\n\r\n\r\n3\r\nabc\r\n0\r\nTrailer: t\r\n\r\n": ("POST", "/c", "", b"\r\n\r\nabc"),
    CHUNKED + b"0\r\n\r\n": ("POST", "/c", "", b""),
    b"PUT /u HTTP/1.1\r\nHost: h\r\n" + UPGRADE + b"Content-Length: 2\r\n\r\nhi": ("PUT", "/u", "", b"hi"),
    b"POST /u HTTP/1.1\r\nHost: h\r\n" + UPGRADE + CODING + b"1\r\nz\r\n0\r\n\r\n": ("POST", "/u", "", b"z"),
    b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n": ("CONNECT", "h:1", "", b""),
}  # fmt: skip


def read_all(pieces: list[bytes]) -> tuple[list[Request], bytes]:
    """All requests in a stream that arrives in these pieces, and what is left of the last piece."""
    reader, found = RequestReader(LIMITS), list[Request]()
    rest = b""
    for piece in pieces:
        rest = piece
        while rest:
            rest = reader.feed(rest)
            if reader.request is not None:
                found.append(reader.request)
                reader = RequestReader(LIMITS)
    return found, rest


def essence(request: Request) -> tuple[str, str, str, bytes]:
    return request.method, request.path, request.query, request.body


@pytest.mark.parametrize("raw", REQUESTS)
def test_a_request_is_the_same_however_it_is_cut(raw: bytes) -> None:
    (whole,), rest = read_all([raw])
    assert (essence(whole), rest) == (REQUESTS[raw], b"")
    for cut in range(1, len(raw)):
        assert read_all([raw[:cut], raw[cut:]]) == ([whole], b"")
    assert read_all([bytes([each]) for each in raw]) == ([whole], b"")


@pytest.mark.parametrize("first", REQUESTS)
def test_what_follows_a_request_is_given_back(first: bytes) -> None:
    reader = RequestReader(LIMITS)
    assert reader.feed(first + b"GET /next HTTP") == b"GET /next HTTP"
    assert reader.request is not None


@given(
    chosen=st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(min_value=0, max_value=600)),
)
def test_pipelined_requests_are_the_same_however_they_are_cut(chosen: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(chosen)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    found, rest = read_all([stream[start:end] for start, end in itertools.pairwise(edges)])
    assert ([essence(each) for each in found], rest) == ([REQUESTS[each] for each in chosen], b"")


def test_repeated_headers_are_joined_under_one_lower_case_name() -> None:
    (request,), _ = read_all([b"GET / HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nB: \xff\r\nx-a: 2\r\n\r\n"])
    assert request.headers == {b"host": b"h", b"x-a": b"1, 2", b"b": b"\xff"}


def test_trailers_are_not_headers() -> None:
    (request,), _ = read_all([CHUNKED + b"0\r\nX-Session-Id: stolen\r\n\r\n"])
    assert request.headers == {b"host": b"h", b"transfer-encoding": b"chunked"}


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_whether_the_connection_stays(head: bytes, kept: bool) -> None:
    reader = RequestReader(LIMITS)
    reader.feed(head)
    assert reader.keep_alive is kept


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        # Two lengths of one body: whoever is in front of this or behind it may believe the other one.
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (POST + b"Content-Length: 5, 5\r\n\r\n", 400),
        (POST + b"Content-Length: +5\r\n\r\n", 400),
        (POST + b"Content-Length: 0x5\r\n\r\n", 400),
        (POST + b"Content-Length : 5\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"-1\r\n", 400),
        (CHUNKED + b"3\r\nabcd\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n", 400),
        (POST + b"Content-Length: \r\n\r\n", 400),
        (POST + b"Content-Length: 18446744073709551617\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: identity, chunked\r\n\r\n", 501),
        (POST + b" Transfer-Encoding: chunked\r\n\r\n", 400),
        (POST + b"X: a\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (POST + b"X: a\rb\r\n\r\n", 400),
        (CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3;a\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3\r\nabc\n0\r\n\r\n", 400),
        (CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n", 400),
        # Whose request is it?
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: user@h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h/path\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h:8a\r\n\r\n", 400),
        # Not HTTP/1.1.
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX\xe9: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        # Too much.
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 500, 431),
        (b"\r\n" * 251, 431),
        (POST + b"Content-Length: 1001\r\n\r\n", 413),
        (CHUNKED + b"3e9\r\n" + b"x" * 1001, 413),
        (CHUNKED + b"1;" + b"x" * 600, 431),
        (CHUNKED + b"0\r\nTrailer: " + b"x" * 600, 431),
        (POST + b"Expect: the-unexpected\r\nContent-Length: 1\r\n\r\n", 417),
    ],
)
def test_what_is_refused(raw: bytes, status: int) -> None:
    for pieces in ([raw], [bytes([each]) for each in raw]):
        with pytest.raises(RefusedError) as refused:
            read_all(pieces)
        assert refused.value.status == status


@pytest.mark.parametrize(
    "host", [b"", b"h", b"a_b-c.example:8000", b"127.0.0.1:80", b"[::1]:80", b"[fe80::1%25eth0]", b"h:"]
)
def test_what_is_a_host(host: bytes) -> None:
    (request,), _ = read_all([b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host])
    assert request.headers == {b"host": host}


def test_limits_are_inclusive() -> None:
    head = POST + b"Content-Length: 1000\r\nX: "
    padding = b"x" * (500 - len(head) - 4)
    (request,), _ = read_all([head + padding + b"\r\n\r\n" + b"b" * 1000])
    assert len(request.body) == 1000
    with pytest.raises(RefusedError, match="500 bytes"):
        read_all([head + padding + b"x\r\n\r\n" + b"b" * 1000])


def test_a_body_in_the_smallest_chunks_is_taken() -> None:
    (request,), _ = read_all([CHUNKED + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n"])
    assert request.body == b"x" * 1000


def test_a_megabyte_of_empty_lines_does_not_hold_up_the_router() -> None:
    """Each of them may end the request. Work that grows with the square of their number would run into the time limit
    of all tests."""
    lines = b"\r\n" * 500_000
    reader = RequestReader(dataclasses.replace(LIMITS, max_body_bytes=len(lines)))
    assert reader.feed(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\nGET" % (len(lines), lines)) == b"GET"
    assert reader.request is not None
    assert reader.request.body == lines
    with pytest.raises(RefusedError):
        RequestReader(dataclasses.replace(LIMITS, max_header_bytes=len(lines) - 1)).feed(lines)


def test_a_head_alone_tells_whether_the_client_waits_to_be_asked_for_the_body() -> None:
    reader = RequestReader(LIMITS)
    reader.feed(POST + b"Expect: 100-Continue\r\nContent-Length: 3\r\n\r\n")
    assert (reader.head_complete, reader.wants_continue, reader.request) == (True, True, None)
    assert reader.feed(b"abc") == b""
    assert reader.request is not None
    old = RequestReader(dataclasses.replace(LIMITS))
    old.feed(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
    assert not old.wants_continue
