"""Reads the logs that a backend had units write: the last lines, and new ones as they come.

Used for `headrace logs` and for the words of an error about a unit that ended. A log may be huge, may hold bytes that
are no text, and may be written while it is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 64 * 1024
_LONGEST_TAIL_BYTES = 8 * 1024 * 1024
"""A log without line ends must not be read as a whole."""
_LONGEST_LINE_BYTES = 1024 * 1024
_PAUSE_S = 0.2


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines, read from the end only; none if there is no such log."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(_start_of_last(file, end, lines))
            data = file.read(end - file.tell())
    except FileNotFoundError:
        return []
    return [_shown(line) for line in _split(data)]


def pause() -> bool:
    """What `follow` does between looks unless told otherwise: wait a little, then go on."""
    time.sleep(_PAUSE_S)
    return True


def follow(paths: Sequence[Path], last_lines: int, wait: Callable[[], bool] = pause) -> Iterator[tuple[str, str]]:
    """(name, line) of each log, the name without folder and suffix: its last lines, then new ones as they come.

    A log that appears later is read from its start, and so is one that was cut or replaced. When there is nothing
    new, `wait` waits and says whether to go on; at the end a last line without line end is given too.
    """
    readers = [LogReader(path, last_lines) for path in paths]
    going_on = True
    while going_on:
        found_nothing = True
        for reader in readers:
            for line in reader.new_lines():
                found_nothing = False
                yield reader.name, line
        if found_nothing:
            going_on = wait()
    # What was written while `wait` made up its mind is still given.
    for reader in readers:
        for line in (*reader.new_lines(), *reader.rest()):
            yield reader.name, line


class LogReader:
    """Where one followed log was read up to. At first that is the start of its last lines; a log that appears later is
    read from its start, and so is one that was cut or replaced."""

    def __init__(self, path: Path, last_lines: int) -> None:
        self.name = path.stem
        self._path = path
        self._last_lines = last_lines
        self._inode: int | None = None
        self._offset = 0
        self._begun = b""
        self._exists_from_start = path.exists()

    def new_lines(self) -> Iterator[str]:
        """All complete lines since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._exists_from_start = False
            return
        with file:
            self._find_position(file)
            file.seek(self._offset)
            while data := file.read(_BLOCK_BYTES):
                self._offset += len(data)
                *complete, self._begun = (self._begun + data).split(b"\n")
                yield from (_shown(line) for line in complete)
                if len(self._begun) > _LONGEST_LINE_BYTES:
                    yield from self.rest()

    def rest(self) -> Iterator[str]:
        """What was read of a line that has no end yet."""
        if self._begun:
            begun, self._begun = self._begun, b""
            yield _shown(begun)

    def _find_position(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if self._inode is None and self._exists_from_start:
            self._offset = _start_of_last(file, status.st_size, self._last_lines)
        elif status.st_ino != self._inode or status.st_size < self._offset:
            self._offset, self._begun = 0, b""
        self._inode = status.st_ino


def _start_of_last(file: BinaryIO, end: int, lines: int) -> int:
    """Where the last `lines` lines before `end` begin. A line without end at the very end counts as one."""
    if lines <= 0:
        return end
    position = end
    while position > 0 and end - position < _LONGEST_TAIL_BYTES:
        step = min(_BLOCK_BYTES, position)
        # The line end at the very end closes the last line and begins no other.
        searched = step - 1 if position == end else step
        position -= step
        file.seek(position)
        block = file.read(step)
        while (found := block.rfind(b"\n", 0, searched)) >= 0:
            lines -= 1
            if lines == 0:
                return position + found + 1
            searched = found
    return position


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _shown(line: bytes) -> str:
    """A line as a terminal would leave it: of a progress bar that rewrites itself only the last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
