"""The planner brings in nothing that reads files, starts programs or talks to the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
SCRIPT = """
import sys
import orchestrator.plan.build
ours = ("orchestrator", "connectors", "router", "deploy", "monitoring")
print(*sorted(name for name in sys.modules if name.split(".")[0] in ours))
"""
SHELLS = ("orchestrator.observe", "orchestrator.supervisor", "orchestrator.store", "router.io", "router.main")


def test_planning_loads_no_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    loaded = done.stdout.split()
    assert "orchestrator.plan.build" in loaded
    shells = (*SHELLS, "connectors.abilities", "connectors.engine_client", "deploy.probe", "deploy.local", "aiohttp")
    assert [name for name in loaded if name.startswith(shells)] == []
