"""The life of a job as a client drives it that a generator has made from the OpenAPI document, and as
`deploy/examples/api.sh` does with curl. Both take any job, so that stubs and real engines have the same life."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "examples" / "api.sh"
PACKAGE = "headrace_client"
LOOK_EVERY_S = 0.2


@contextmanager
def generated(document: Mapping[str, Any], folder: Path) -> Iterator[None]:
    """A client of the document that can be imported as `PACKAGE` meanwhile."""
    (folder / "openapi.json").write_text(json.dumps(document))
    # Formatting what nobody reads.
    (folder / "generator.yml").write_text("post_hooks: []\n")
    program = [sys.executable, "-c", "from openapi_python_client.cli import app; app()", "generate", "--meta", "none"]
    places = ["--path", "openapi.json", "--config", "generator.yml", "--output-path", PACKAGE]
    done = subprocess.run([*program, *places], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class GeneratedLife:
    url: str
    token: str
    within_s: float
    """For each operation."""

    def live(self, job_file: Mapping[str, Any], checkpoint: str | None) -> list[str]:
        """The states of the job's operations, the newest first. `checkpoint`: a folder with new weights."""
        name = job_file["name"]
        job = self._model("job_spec.JobSpec").from_dict(job_file)
        verdict = self._call("plans.validate_job", body=job)
        assert verdict.is_usable, verdict
        self._see_through(self._call("jobs.start_job", body=job))
        assert name in [each.name for each in self._call("jobs.list_jobs").jobs]
        shown = self._call("jobs.show_job", name)
        assert shown.phase == "ready", shown.reason
        if checkpoint is not None:
            source = {"transport": "path", "version": "from-client", "path": checkpoint}
            push = self._model("push_body.PushBody").from_dict({"source": source})
            self._see_through(self._call("weights.push_weights", name, body=push))
            assert self._call("weights.show_weights", name).served.version == "from-client"
        role = shown.engines[-1].role
        for replicas in (2, 1):
            body = self._model("scale_body.ScaleBody")(replicas=replicas)
            self._see_through(self._call("replicas.scale_role", name, role, body=body))
            assert [each.role for each in self._call("jobs.show_job", name).engines].count(role) == replicas
        force = self._model("leave_body.LeaveBody")(force=True)
        self._see_through(self._call("replicas.restart_process", name, shown.engines[-1].name, body=force))
        kinds = {each.kind for each in self._call("events.list_job_events", name, limit=1000).events}
        assert {"job_phase", "process_restarted", "request_ended"} <= kinds
        drain = self._model("stop_job_mode.StopJobMode")("drain")
        self._see_through(self._call("jobs.stop_job", name, wait=False, mode=drain, limit_s=30.0))
        states = [each.state for each in self._call("operations.list_operations", job=name).operations]
        assert self._call("jobs.forget_job", name) is None
        assert self._call("jobs.show_job", name).status == 404
        return states

    def _call(self, function: str, *given: Any, **named: Any) -> Any:
        client = importlib.import_module(PACKAGE).AuthenticatedClient(
            base_url=self.url, token=self.token, httpx_args={"trust_env": False}, timeout=30.0
        )
        with client:
            return importlib.import_module(f"{PACKAGE}.api.{function}").sync(*given, client=client, **named)

    def _model(self, place: str) -> Any:
        module, _, name = place.partition(".")
        return getattr(importlib.import_module(f"{PACKAGE}.models.{module}"), name)

    def _see_through(self, answer: Any) -> None:
        """Poll the operation that an answer names until it has succeeded."""
        deadline = time.monotonic() + self.within_s
        while (found := self._call("operations.show_operation", answer.operation)).state in ("pending", "running"):
            assert time.monotonic() < deadline, found
            time.sleep(LOOK_EVERY_S)
        assert found.state == "succeeded", found


def live_with_curl(job_file: Path, url: str, token: str, within_s: float, **settings: str) -> str:
    """What the script has printed. `settings`: PROMPT and CHECKPOINT."""
    given = {**os.environ, "URL": url, "TOKEN": token, "no_proxy": "127.0.0.1", **settings}
    done = subprocess.run(
        ["sh", str(SCRIPT), str(job_file)], env=given, capture_output=True, text=True, check=False, timeout=within_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
