"""Run as a script: starts one unit with a backend of its own, prints the record as JSON and is gone.

It stands for an orchestrator that crashed: whoever comes after it has nothing but the record.
Arguments: run id, log folder, unit name, then the unit's command line.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from deploy.local.backend import LocalBackend
from deploy.unit import LaunchUnit, ListenProbe, RunContext

run_id, log_dir, name, *argv = sys.argv[1:]
record = LocalBackend().start(
    RunContext(job="test", run_id=run_id, log_dir=Path(log_dir)),
    LaunchUnit(
        name=name,
        node="here",
        argv=tuple(argv),
        probe=ListenProbe(port=1),
        start_stage=0,
        ready_timeout_s=10.0,
        stop_grace_s=1.0,
    ),
)
print(json.dumps(asdict(record), default=str), flush=True)
os._exit(0)
