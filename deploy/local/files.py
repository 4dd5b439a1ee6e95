"""Writes the planned files of a run and opens its logs. Called by `backend`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from deploy.errors import FileNotWritten
from deploy.unit import PlannedFile

_FILE_MODE = 0o644
_FOLDER_MODE = 0o755


def write_file(file: PlannedFile) -> None:
    """Put `file` in place as a whole: a reader sees the old text or the new one.

    Raises:
        FileNotWritten: names the path and the cause.
    """
    draft = file.path.with_name(f".{file.path.name}.{os.getpid()}.draft")
    with _named_failure(file.path):
        _make_folder(file.path.parent)
        try:
            draft.write_text(file.text, encoding="utf-8")
            draft.chmod(_FILE_MODE)
            draft.replace(file.path)
        finally:
            draft.unlink(missing_ok=True)


def open_for_append(path: Path) -> BinaryIO:
    """Open a log whose earlier content stays.

    Raises:
        FileNotWritten: names the path and the cause.
    """
    with _named_failure(path):
        _make_folder(path.parent)
        return path.open("ab")


@contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotWritten(path=path, cause=error.strerror or str(error)) from error


def _make_folder(path: Path) -> None:
    """Make a folder and its missing parents, readable whatever the umask; folders that exist stay as they are."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        folder.chmod(_FOLDER_MODE)
