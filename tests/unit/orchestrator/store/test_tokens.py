"""Tokens of `store/tokens.py`: made once, kept, readable by their owner alone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from orchestrator.store.home import StateUnusable
from orchestrator.store.tokens import TokensRefused, kept_token, read_roles, write_fresh_token


def test_a_kept_token_stays(tmp_path: Path) -> None:
    path = tmp_path / "state" / "api-token"
    first = kept_token(path)
    assert len(first) >= 32
    assert kept_token(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_fresh_token_replaces_the_old_one_and_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    write_fresh_token(path)
    assert path.read_text() != "old"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "api-token"
    for nothing in ("", "\n"):
        path.write_text(nothing)
        path.chmod(0o600)
        token = kept_token(path)
        assert len(token) >= 32
        assert kept_token(path) == token


def test_a_token_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "api-token"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateUnusable, match="No space left"):
        kept_token(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    with pytest.raises(StateUnusable):
        write_fresh_token(path)
    assert [(each, each.read_text()) for each in tmp_path.iterdir()] == [(path, "old")]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_kept_token_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "api-token"
    kept_token(path)
    path.chmod(mode)
    with pytest.raises(TokensRefused, match=f"chmod 600 {path}"):
        kept_token(path)


def test_a_folder_in_its_place_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.mkdir()
    for call in (write_fresh_token, kept_token):
        with pytest.raises(StateUnusable, match="token"):
            call(path)


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tokens_with_their_roles(tmp_path: Path) -> None:
    path = written(tmp_path, '"a b" = "viewer"\nplain = "trainer"\n')
    assert read_roles(path) == {"a b": "viewer", "plain": "trainer"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_of_tokens_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, 'secret = "viewer"\n', mode)
    with pytest.raises(TokensRefused, match=f"chmod 600 {path}"):
        read_roles(path)


@pytest.mark.parametrize("text", ['sec"ret = 1', "secret = 1", 'secret = "root"', '"" = "viewer"', "[secret]", "\0"])
def test_a_file_of_tokens_that_says_something_else(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokensRefused, match=r"tokens\.toml") as refused:
        read_roles(written(tmp_path, text))
    assert "secret" not in str(refused.value)


def test_no_file_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(TokensRefused, match="No such file"):
        read_roles(tmp_path / "none")
