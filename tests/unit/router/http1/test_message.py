from __future__ import annotations

import pytest

from router.io.http1.message import STATUS_LINES, header_lines, split_target


@pytest.mark.parametrize(
    "headers", [[("x-id", "a\r\nEvil: b")], [("x-id", "a\nb")], [("x-id\r", "a")], [("a", "\r\n")]]
)
def test_a_header_cannot_smuggle_in_a_line(headers: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="line break"):
        header_lines(headers)


def test_headers_are_written_one_per_line() -> None:
    assert header_lines([("A", "b"), ("C", "")]) == "A: b\r\nC: \r\n"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/", ("/", "")),
        ("/v1/models?a=b?c", ("/v1/models", "a=b?c")),
        ("/a%20b#part", ("/a%20b", "")),
        ("//double/slash", ("//double/slash", "")),
        ("/redirect?to=http://elsewhere/x", ("/redirect", "to=http://elsewhere/x")),
        ("http://host:8000/v1/models?x=1", ("/v1/models", "x=1")),
        ("http://host", ("/", "")),
        ("http://host?x=1/2", ("/", "x=1/2")),
        ("*", ("*", "")),
        ("host:443", ("host:443", "")),
    ],
)
def test_path_and_query_of_every_form_of_target(target: str, expected: tuple[str, str]) -> None:
    assert split_target(target) == expected


def test_a_status_without_a_phrase_has_a_line() -> None:
    assert STATUS_LINES[200] == "HTTP/1.1 200 OK\r\n"
    assert STATUS_LINES[499] == "HTTP/1.1 499 \r\n"
