"""Tokens of `store/tokens.py`: made once, kept, readable by their owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from orchestrator.store.home import StateUnusable
from orchestrator.store.tokens import kept_token, write_fresh_token


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


def test_a_folder_in_its_place_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.mkdir()
    for call in (write_fresh_token, kept_token):
        with pytest.raises(StateUnusable, match="token"):
            call(path)
