"""The installed NIXL and vLLM let what waits rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.engine_env import resting_environment
from connectors.nixl import ucx_environment

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]

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


QUEUE = """
import threading, time
from connectors.vllm_plugin.register import register
register()
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(n_reader=1, n_local_reader=1)
reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)
ready = threading.Thread(target=reader.wait_until_ready)
ready.start()
writer.wait_until_ready()
ready.join()
def write():
    for number in range(2000):
        writer.enqueue(number)
        time.sleep(number % 2 * 0.001)
    time.sleep(1)
    writer.enqueue("last")
threading.Thread(target=write).start()
assert [reader.dequeue() for _ in range(2000)] == list(range(2000))
before = time.thread_time()
assert reader.dequeue() == "last"
print("used", time.thread_time() - before, flush=True)
"""


@pytest.mark.parametrize("program", [IDLE, QUEUE], ids=["nixl", "vllm"])
def test_what_waits_for_a_second_leaves_the_core_to_others(program: str) -> None:
    ucx, _ = ucx_environment("cpu", "loopback", None)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **ucx, **resting_environment("cpu")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition("used ")[2]) < 0.3, "seconds of one: it polls without pause"
