"""A poller that fails ends the process, with its reason in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.core.fleet import Fleet
from router.main import main
from router.settings import TOKEN_FILE_VARIABLE
from tests.integration.router.harness import make_settings


def test_a_failed_poller_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_fleet: Fleet, _now: float) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Fleet, "expire_sessions", fail)
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    config = tmp_path / "router.json"
    config.write_text(make_settings([]).model_dump_json())
    assert main(["--config", str(config)]) == 3
    assert "Traceback" in caplog.text
    assert "RuntimeError: a mistake of ours" in caplog.text
