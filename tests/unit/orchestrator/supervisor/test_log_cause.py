"""The line that says why: on excerpts of real logs."""

from __future__ import annotations

import pytest

from orchestrator.supervisor.log_cause import likely_cause, missing_library

LOADER = """\
/venv/bin/mooncake_master_bin: error while loading shared libraries: liburing.so.2: cannot open shared object file: \
No such file or directory
"""

VLLM = """\
(APIServer pid=4021) INFO 11-29 16:58:01 [utils.py:233] non-default args: {'model': '/tmp/broken model'}
(EngineCore pid=4100) ERROR 11-29 16:58:09 [core.py:1001] EngineCore failed to start.
(EngineCore pid=4100) ERROR 11-29 16:58:09 [core.py:1001] Traceback (most recent call last):
(EngineCore pid=4100) ERROR 11-29 16:58:09 [core.py:1001]   File "/venv/vllm/v1/engine/core.py", line 992, in run
(EngineCore pid=4100) ERROR 11-29 16:58:09 [core.py:1001]     raise ValueError(
(EngineCore pid=4100) ERROR 11-29 16:58:09 [core.py:1001] ValueError: To serve at least one request with \
max seq len (4096), 0.50 GiB KV cache is needed
(APIServer pid=4021) Traceback (most recent call last):
(APIServer pid=4021)   File "/venv/bin/vllm", line 8, in <module>
(APIServer pid=4021) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""

GLOG = """\
WARNING: Logging before InitGoogleLogging() is written to STDERR
I1129 16:24:43.949679 16086 master.cpp:1522] Master service started on port 28160, max_threads=2
E1129 16:31:44.244479 17332 transfer_metadata.cpp:1098] Local segment descriptor not found
I1129 16:31:45.000001 17332 master_service.cpp:2596] Task cleanup thread started
"""

GLOG_FATAL = """\
E1129 16:31:44.244479 17332 rpc_service.cpp:10] bind failed
F20251129 16:31:44.300000 17332 master.cpp:77] Check failed: server.start() Address already in use
*** Check failure stack trace: ***
    @     0x7f1c google::LogMessage::Fail()
"""

ARGPARSE = """\
usage: vllm serve [model_tag] [options]
vllm: error: unrecognized arguments: --no-such-flag
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        pytest.param(LOADER, LOADER.strip(), id="loader"),
        pytest.param(
            VLLM,
            "ValueError: To serve at least one request with max seq len (4096), 0.50 GiB KV cache is needed",
            id="vLLM's wrapper stands below the cause",
        ),
        pytest.param(GLOG, GLOG.splitlines()[2], id="glog error"),
        pytest.param(GLOG_FATAL, GLOG_FATAL.splitlines()[1], id="glog fatal after error"),
        pytest.param(ARGPARSE, "error: unrecognized arguments: --no-such-flag", id="wrong use"),
        pytest.param("Traceback:\n  assert x\nAssertionError\n", "AssertionError", id="an exception without words"),
        pytest.param("torch.OutOfMemoryError: CUDA out of memory.\n", "torch.OutOfMemoryError: CUDA out of memory."),
        pytest.param("INFO all is well\nbye\n\n", "bye", id="nothing names an error"),
        pytest.param("", "the log is empty", id="empty"),
        pytest.param("\n  \n", "the log is empty", id="blank"),
    ],
)
def test_likely_cause(log: str, cause: str) -> None:
    assert likely_cause(log.splitlines()) == cause


def test_the_wrapper_alone_is_still_better_than_nothing() -> None:
    wrapper = "RuntimeError: Engine core initialization failed. See root cause above."
    assert likely_cause([wrapper]) == wrapper


def test_missing_library() -> None:
    assert missing_library(LOADER.splitlines()) == "liburing.so.2"
    assert missing_library(VLLM.splitlines()) is None
