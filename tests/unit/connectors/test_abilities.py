"""Asking an interpreter for its engine stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.abilities import EngineNotFound, ask
from connectors.ask_engine import layouts, source_text


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('echo \'{"missing": "vllm"}\'', "has no vllm installed"),
        ("echo broken >&2; exit 3", "failed: broken"),
        ("echo no json", "cannot be asked for its engine stack"),
    ],
)
def test_an_interpreter_without_an_engine(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(EngineNotFound, match=says):
        ask(script(tmp_path, body))


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineNotFound, match="cannot be asked"):
        ask(str(tmp_path / "absent"))


def test_an_answer_is_typed(tmp_path: Path) -> None:
    answer = (
        '{"python": "p", "platform": "cpu", "vllm_version": "1", "mooncake_version": null, "nixl_version": null,'
        ' "mooncake_master": null, "mooncake_client": null, "save_decode_cache": true, "kv_cache_layouts": ["A"],'
        ' "cross_layers_blocks": false, "scale_out_flag": true, "per_request_metrics": true,'
        ' "quiet_access_log": true, "load_failure_policy": true, "handoff_lease": true}'
    )
    found = ask(script(tmp_path, f"echo '{answer}'"))
    assert (found.platform, found.kv_cache_layouts, found.mooncake_master) == ("cpu", ("A",), None)


def test_layouts_are_read_from_source(tmp_path: Path) -> None:
    assert layouts(tmp_path) == []
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "kv_cache_layout.py").write_text("class L(Enum):\n    LBHNC = (0, 1)\n    BLHNC = (1, 0)\n")
    assert layouts(tmp_path) == ["LBHNC", "BLHNC"]
    assert "class L" in source_text(tmp_path, "v1/*.py")
