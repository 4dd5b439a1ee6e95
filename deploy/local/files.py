"""Writes the planned files of a run and opens its logs. Called by `backend`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from deploy.errors import FileNotWritten, FolderNotOurs
from deploy.unit import PlannedFile

_FILE_MODE = 0o644
_FOLDER_MODE = 0o755
_PRIVATE_MODE = 0o700


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


def make_private_folder(path: Path) -> None:
    """Make a folder for this user alone. Its parent may be everybody's, so one that is there already may be anybody's.

    Raises:
        FileNotWritten: it cannot be made.
        FolderNotOurs: it is there, and others can change what is in it.
    """
    with _named_failure(path):
        with suppress(FileExistsError):
            path.mkdir(mode=_PRIVATE_MODE, parents=True)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise FolderNotOurs(path=path, cause="is no folder")
    if found.st_uid != os.getuid():
        raise FolderNotOurs(path=path, cause=f"belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FolderNotOurs(path=path, cause=f"has mode {stat.S_IMODE(found.st_mode):o}")


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
