from __future__ import annotations

import pytest

from deploy.logs import follow, tail


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"", 3, []),
        (b"one\n", 3, ["one"]),
        (b"one\ntwo\nthree\n", 2, ["two", "three"]),
        (b"one\ntwo\nthree", 2, ["two", "three"]),
        (b"one\n\n\n", 2, ["", ""]),
        (b"one\ntwo\n", 0, []),
        (b"bad \xff byte\r\n", 1, ["bad \ufffd byte"]),
        (b"loading 1%\rloading 100%\ndone\n", 2, ["loading 100%", "done"]),
    ],
)
def test_tail(tmp_path, content, lines, expected):
    path = tmp_path / "a.log"
    path.write_bytes(content)
    assert tail(path, lines) == expected


def test_tail_of_no_log_is_empty(tmp_path):
    assert tail(tmp_path / "a.log", 5) == []


def test_tail_reads_back_over_many_blocks(tmp_path):
    path = tmp_path / "a.log"
    lines = [f"{number} " + "x" * 1000 for number in range(1000)]
    path.write_text("\n".join(lines) + "\n")
    assert tail(path, 300) == lines[-300:]


def test_tail_of_a_huge_file_reads_only_its_end(tmp_path):
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\nlast\n")
    assert tail(path, 1) == ["last"]
    assert len(tail(path, 2)[0]) < 16 << 20


class Script:
    """Stands for `wait`: each call does the next step; after the last the following ends."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def __call__(self) -> bool:
        if self.steps:
            self.steps.pop(0)()
        return bool(self.steps)


def appending(path, data: bytes):
    def step() -> None:
        with path.open("ab") as file:
            file.write(data)

    return step


def test_follow_gives_the_last_lines_then_new_ones_by_name(tmp_path):
    a, b = tmp_path / "decode-0.log", tmp_path / "decode-1.log"
    a.write_bytes(b"1\n2\n3\n")
    b.write_bytes(b"x\n")
    script = Script(appending(a, b"4\n5 has no "), appending(a, b"end yet\n"), appending(b, b"y"))
    assert list(follow([a, b], 2, script)) == [
        ("decode-0", "2"),
        ("decode-0", "3"),
        ("decode-1", "x"),
        ("decode-0", "4"),
        ("decode-0", "5 has no end yet"),
        ("decode-1", "y"),
    ]


def test_follow_reads_a_log_that_appears_later_from_its_start(tmp_path):
    path = tmp_path / "a.log"
    assert list(follow([path], 1, Script(lambda: None, appending(path, b"1\n2\n3\n")))) == [
        ("a", "1"),
        ("a", "2"),
        ("a", "3"),
    ]


def test_follow_starts_again_when_a_log_is_cut_or_replaced(tmp_path):
    path, other = tmp_path / "a.log", tmp_path / "b.log"
    path.write_bytes(b"first\nbegun")
    other.write_bytes(b"replaced by a longer one\n")
    script = Script(lambda: path.write_bytes(b"cut\n"), path.unlink, lambda: other.rename(path))
    assert [line for _, line in follow([path], 10, script)] == ["first", "cut", "replaced by a longer one"]


def test_follow_does_not_hold_an_endless_line_back(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * (3 << 20))
    lines = [line for _, line in follow([path], 1, Script())]
    assert len(lines) > 1
    assert sum(map(len, lines)) == 3 << 20
