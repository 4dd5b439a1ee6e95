"""The rules of the house that a tool can check."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "connectors", "router", "monitoring", "deploy")
FILE_LINES = 400
FUNCTION_LINES = 80
CORES = (
    "orchestrator/spec",
    "orchestrator/plan",
    "orchestrator/observe/diagnoses.py",
    "orchestrator/operations.py",
    "orchestrator/replica_requests.py",
    "orchestrator/supervisor/log_cause.py",
    "orchestrator/supervisor/mounts.py",
    "orchestrator/supervisor/reconcile.py",
    "orchestrator/supervisor/restarts.py",
    "orchestrator/supervisor/state.py",
    "orchestrator/supervisor/upkeep.py",
    "orchestrator/weights/acts.py",
    "orchestrator/weights/agreement.py",
    "orchestrator/weights/course.py",
    "orchestrator/weights/events.py",
    "orchestrator/weights/groups.py",
    "orchestrator/weights/knowledge.py",
    "orchestrator/weights/machine.py",
    "orchestrator/weights/needs.py",
    "orchestrator/weights/phases.py",
    "orchestrator/weights/post.py",
    "orchestrator/weights/told.py",
    "orchestrator/weights/words.py",
    "deploy/local/membership.py",
    "router/core",
    "router/settings.py",
    "deploy/unit.py",
    "monitoring/catalogue.py",
    "monitoring/rules.py",
    "monitoring/scrape.py",
    "monitoring/dashboards",
    "connectors/chain.py",
    "connectors/engine_argv.py",
    "connectors/engine_env.py",
    "connectors/handoff.py",
    "connectors/layout.py",
    "connectors/mooncake.py",
    "connectors/nixl.py",
    "connectors/offload.py",
    "connectors/reference.py",
    "connectors/replays.py",
    "connectors/store_argv.py",
    "connectors/types.py",
    "connectors/vllm_plugin/fence_rules.py",
)
IO_MODULES = frozenset(
    [
        "aiohttp",
        "asyncio",
        "httpx",
        "multiprocessing",
        "random",
        "requests",
        "secrets",
        "selectors",
        "socket",
        "sqlite3",
        "subprocess",
        "threading",
        "time",
        "urllib.request",
        "uuid",
    ]
)
MAY_READ_FILES = ("orchestrator/spec/load.py",)
"""Takes the path of a job file; everything else of the cores is given text."""


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def cores() -> list[Path]:
    found = [path for core in CORES if (ROOT / core).is_dir() for path in sources(core)]
    return found + [ROOT / core for core in CORES if (ROOT / core).is_file()]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


OURS = list(sources(*PACKAGES))


def test_import_contracts_hold() -> None:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    assert program is not None, "import-linter is missing; it comes with the dev dependencies"
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [*OURS, *sources("tests")], ids=name_of)
def test_a_file_is_of_readable_length(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES


def test_functions_are_of_readable_length() -> None:
    found = [
        f"{name_of(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in [*OURS, *sources("tests")]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    """Empty `__init__.py` files need no words."""
    missing = [name_of(path) for path in OURS if path.stat().st_size and ast.get_docstring(tree_of(path)) is None]
    assert missing == []


def test_every_core_listed_here_exists() -> None:
    assert [core for core in CORES if not (ROOT / core).exists()] == []


def io_in(node: ast.AST) -> Iterator[str]:
    """What this node does that a core must not."""
    if isinstance(node, ast.AsyncFunctionDef | ast.Await):
        yield f"line {node.lineno}: async"
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        yield from (f"line {node.lineno}: imports {name}" for name in names if name in IO_MODULES)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input"):
        yield f"line {node.lineno}: {node.func.id}"
    if isinstance(node, ast.Attribute) and node.attr in ("read_text", "write_text", "read_bytes", "write_bytes"):
        yield f"line {node.lineno}: {node.attr}"


@pytest.mark.parametrize("path", cores(), ids=name_of)
def test_a_core_does_no_io_and_never_waits(path: Path) -> None:
    if name_of(path) not in MAY_READ_FILES:
        assert [found for node in ast.walk(tree_of(path)) for found in io_in(node)] == []


def test_no_em_dash_in_sources() -> None:
    texts = [*OURS, *sources("tests"), *sorted(ROOT.glob("*.md"))]
    texts += [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.md"))]
    assert [name_of(path) for path in texts if chr(0x2014) in path.read_text(encoding="utf-8")] == []


def test_no_mark_of_unfinished_work() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    found = [f"{name_of(path)}: {mark}" for path in OURS for mark in marks if mark in path.read_text(encoding="utf-8")]
    assert found == []


def test_every_error_stands_in_the_tree_with_its_place() -> None:
    tree = ast.get_docstring(ast.parse((ROOT / "orchestrator" / "errors.py").read_text())) or ""
    drawn = dict(re.findall(r"── (\w+) .*?(?:\(([\w/.]+)\))?$", tree, re.MULTILINE))
    found: dict[str, str] = {}
    for path in (ROOT / "orchestrator").rglob("*.py"):
        for name, base in re.findall(r"^class (\w+)\((\w+)\):", path.read_text(), re.MULTILINE):
            if base == "HeadraceError" or base in drawn:
                place = str(path.relative_to(ROOT / "orchestrator"))
                found[name] = "" if place == "errors.py" else place
    assert found == drawn
