"""The installed NIXL does as it is told about its polling."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.nixl import polling_environment, ucx_environment

pytestmark = pytest.mark.stack

IDLE = """
import os, time
from connectors.vllm_plugin.register import register
register()
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("idle", nixl_agent_config(num_threads=1))
before = time.process_time()
time.sleep(1)
print("used", time.process_time() - before, flush=True)
os._exit(0)  # UCX's InfiniBand module crashes a process at its end where there is no InfiniBand.
"""


def test_an_idle_agent_leaves_the_core_to_others() -> None:
    ucx, _ = ucx_environment("cpu", "loopback", None)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **ucx, **polling_environment("cpu")}
    done = subprocess.run(
        [sys.executable, "-c", IDLE], env=environment, capture_output=True, text=True, timeout=50, check=True
    )
    used = float(done.stdout.rpartition("used ")[2])
    assert used < 0.3, "seconds of one: NIXL polls without pause"
