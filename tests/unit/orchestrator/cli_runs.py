"""Runs of the `headrace` command, as a user meets it: its output and its exit code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.cli import main

JOB = """
name = "demo"
[model]
path = "{model}"
[engine]
block_size = 32
[kv_offload]
type = "mooncake"
cpu.num_bytes = "64MiB"
[roles.prefill]
[roles.decode]
kv_offload.cpu.num_bytes = 0
[monitoring]
enabled = false
"""


@dataclass(frozen=True, kw_only=True)
class Said:
    stdout: str
    stderr: str


class Cli:
    """Runs the command: as a process where it must be one, else in this one, which is a second faster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.command = [sys.executable, "-m", "orchestrator"]
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("HEADRACE_HOME", str(self.home))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        monkeypatch.delenv("HEADRACE_API_TOKEN", raising=False)
        monkeypatch.delenv("HEADRACE_URL", raising=False)
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str, code: int) -> Said:
        """It must end with `code`, and where it fails it says why; errors go to stderr alone."""
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = self._capsys.readouterr()
        assert end.value.code == code, captured
        if code and not captured.out:
            assert captured.err
        return Said(stdout=captured.out, stderr=captured.err)

    def job(self, text: str = JOB) -> str:
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        (self.folder / "job.toml").write_text(text.format(model=model))
        return "job.toml"
