from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from router.io.start import StartError, load_settings, load_token, raise_open_files
from router.settings import TOKEN_FILE_VARIABLE


def test_the_token_comes_from_the_named_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert load_token({TOKEN_FILE_VARIABLE: str(file)}) == "secret"


def test_a_router_without_a_token_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for environment in (
        {},
        {TOKEN_FILE_VARIABLE: str(tmp_path / "none")},
        {TOKEN_FILE_VARIABLE: str(tmp_path / "empty")},
    ):
        with pytest.raises(StartError, match=TOKEN_FILE_VARIABLE):
            load_token(environment)


def test_settings_that_are_wrong_name_the_file_and_the_field(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    with pytest.raises(StartError, match=r"router\.json: No such file"):
        load_settings(file)
    file.write_text(json.dumps({"job": "j", "hots": "x"}))
    with pytest.raises(StartError, match="hots"):
        load_settings(file)


def test_as_many_open_files_as_the_system_allows() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before, most - 1), most))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
