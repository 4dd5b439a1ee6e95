"""What is shared by the parts that are wired for a machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from orchestrator.compose import local_service
from tests.fakes.stub_job import free_ports, record, stub_plan
from tests.integration.orchestrator.kept_fleet import until


def test_supervision_hears_how_a_process_ended_that_a_start_has_begun(tmp_path: Path) -> None:
    service = local_service(tmp_path)
    job = record(service.store, stub_plan(tmp_path, "stub", free_ports(3)))
    started = service.backend().start(job.run, job.plan.units[0])
    os.kill(started.pid, signal.SIGKILL)
    watching = service.weights.supervision.backend()
    until(lambda: not watching.poll(job.run, [started])[started.name].alive)
    assert watching.poll(job.run, [started])[started.name].exit_code == -signal.SIGKILL
