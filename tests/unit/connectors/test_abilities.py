"""Asking an interpreter for its engine stack."""

from __future__ import annotations

import importlib.util
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from connectors import ask_engine
from connectors.abilities import EngineNotFound, ask
from connectors.ask_engine import PLUGIN, layouts, plugin_path, source_text


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
        ' "quiet_access_log": true, "load_failure_policy": true, "handoff_lease": true,'
        ' "middleware_flag": true, "weight_transfer": true, "plugin_path": null}'
    )
    found = ask(script(tmp_path, f"echo '{answer}'"))
    assert (found.platform, found.kv_cache_layouts, found.mooncake_master) == ("cpu", ("A",), None)


def test_layouts_are_read_from_source(tmp_path: Path) -> None:
    assert layouts(tmp_path) == []
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "kv_cache_layout.py").write_text("class L(Enum):\n    LBHNC = (0, 1)\n    BLHNC = (1, 0)\n")
    assert layouts(tmp_path) == ["LBHNC", "BLHNC"]
    assert "class L" in source_text(tmp_path, "v1/*.py")


def copy_plugin(to: Path) -> None:
    shutil.copytree(PLUGIN, to)
    shutil.copytree(PLUGIN.with_name("weights"), to.with_name("weights"))


class TestPluginPath:
    """What the engine's interpreter needs to find the plug-in of this version."""

    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where the interpreter finds a plug-in; a copy of ours."""
        found = tmp_path / "site-packages" / "connectors" / "vllm_plugin"
        copy_plugin(found)
        spec = ModuleSpec("connectors.vllm_plugin", None, is_package=True)
        spec.submodule_search_locations = [str(found)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
        return found

    @pytest.fixture
    def above(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder of our own packages, where the interpreter does not look."""
        ours = tmp_path / "ours" / "connectors" / "vllm_plugin"
        copy_plugin(ours)
        monkeypatch.setattr(ask_engine, "PLUGIN", ours)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        return ours.parents[1]

    def test_nothing_where_this_version_is_found(self, installed: Path) -> None:
        assert plugin_path() == ""

    @pytest.mark.parametrize("file", ["fence.py", "weights/rank.py", "../weights/source.py"])
    def test_our_folder_where_another_version_is_found(self, above: Path, installed: Path, file: str) -> None:
        (installed / file).write_text("# of last year\n")
        assert plugin_path() == str(above)

    def test_our_folder_before_what_the_shell_says(self, above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/theirs")
        assert plugin_path() == f"{above}:/theirs"

    def test_none_where_our_folder_holds_other_packages_too(self, above: Path) -> None:
        (above / "pydantic-2.0.dist-info").mkdir()
        assert plugin_path() is None
