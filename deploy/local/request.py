"""What a unit's process is started with: values in, values out. `backend` hands the result to the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.process_table import RUN_ID_VARIABLE, UNIT_VARIABLE
from deploy.unit import LaunchUnit, RunContext


def child_environment(base: Mapping[str, str], run: RunContext, unit: LaunchUnit) -> dict[str, str]:
    """`base` without what the unit unsets, with what it sets, and with the marker by which it is found again."""
    kept = {name: value for name, value in base.items() if not _matches(name, unit.unset_env)}
    return {**kept, **unit.env, RUN_ID_VARIABLE: run.run_id, UNIT_VARIABLE: unit.name}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """As `LaunchUnit.unset_env` says. No other wildcard has a meaning."""
    return any(name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns)


def log_path(run: RunContext, unit: LaunchUnit) -> Path:
    assert Path(unit.name).name == unit.name, f"unit name {unit.name!r} is no file name"
    return run.log_dir / f"{unit.name}.log"
