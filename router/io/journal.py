"""The pins of sessions in a file, so that a restarted router finds each conversation's KV again.

One JSON line per session that changed, written between two requests and not on any request's path; the last line of a
session counts. The file is written anew, whole, when the router starts and when most of its lines are outdated. A line
that can't be read (the machine died while it was written) is skipped.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from router.core.records import SessionRecord
from router.core.sessions import Sessions

_log = logging.getLogger(__name__)

_OUTDATED_FACTOR = 4
_SMALL = 4096
"""Lines that are never worth writing anew."""


def read_journal(path: Path) -> list[SessionRecord]:
    """The last record of each session that had pins; nothing where there is no file."""
    found: dict[str, SessionRecord] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                record: SessionRecord = msgspec.json.decode(line, type=SessionRecord)
                found.pop(record.id, None)
                if record.pins:
                    found[record.id] = record
    return list(found.values())


class Journal:
    """Follows the sessions as long as its context."""

    def __init__(self, path: Path, sessions: Sessions, records: list[SessionRecord]) -> None:
        """`records`: what the file says already; it stays until a session of it changes."""
        self._path = path
        self._sessions = sessions
        self._records = records
        self._file: BinaryIO | None = None
        self._lines = 0

    def __enter__(self) -> Self:
        self._rewrite(self._records)
        self._sessions.followed = True
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()

    def flush(self) -> None:
        """Write down what has changed since the last time."""
        changed = self._sessions.take_changes()
        if not changed or self._file is None:
            return
        self._lines += len(changed)
        try:
            if self._lines > _SMALL + _OUTDATED_FACTOR * len(self._sessions):
                self._rewrite(self._sessions.all_records())
            else:
                self._file.write(_lines(changed))
        except OSError as error:
            _log.error("%s can't be written, pins won't outlive this router: %s", self._path, error)
            self._file.close()
            self._file = None

    def _rewrite(self, records: list[SessionRecord]) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_bytes(_lines(records))
        fresh.replace(self._path)
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._lines = len(records)


def _lines(records: list[SessionRecord]) -> bytes:
    return b"".join([msgspec.json.encode(each) + b"\n" for each in records])
