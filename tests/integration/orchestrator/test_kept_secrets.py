"""A job with known secrets is planned, started, looked at, updated and stopped; none of them is in anything that is
written or answered on the way, nor on a command line."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.integration.orchestrator.control_plane import ROOT, RunningControlPlane, running_control_plane
from tests.unit.orchestrator.samples import pd_data

ENVIRONMENT = {
    "HEADRACE_API_TOKEN": "known-admin-token",
    "HEADRACE_TRAINER_TOKEN": "known-trainer-token",
    "HEADRACE_VIEWER_TOKEN": "known-viewer-token",
}
IN_JOB = {"HF_TOKEN": "known-hub-token", "AWS_SECRET_ACCESS_KEY": "known-access-key"}
OWN = {"DB_PASSWORD": "known-password"}
KNOWN = re.compile("known-[a-z-]+")
JOB = pd_data(env=IN_JOB, roles={"decode": {"env": OWN}}, weights={}, monitoring={"enabled": True})
SOURCE = {"transport": "path", "path": "/checkpoints/1", "version": "step-1"}


def answers(client: httpx.Client, trainer: httpx.Client) -> list[str]:
    """Of a whole life, mistakes included."""
    wrong = {**JOB, "env": {"HF_TOKEN": ["known-hub-token"], "API_KEY": "known-key\0"}}
    refused = {**JOB, "engine": {"hf_token": "known-hub-token"}, "env": {**IN_JOB, "VLLM_API_KEY": "known-engine-key"}}
    replies = [client.post(call, json=job) for call in ("/validate", "/render", "/jobs") for job in (wrong, refused)]
    replies += [client.post("/validate", json=JOB), client.post("/render", json=JOB), client.post("/jobs", json=JOB)]
    assert replies[-1].status_code == 202
    deadline = time.monotonic() + 30
    while client.get("/jobs/demo").json()["phase"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    differs = {**JOB, "env": {**IN_JOB, "HF_TOKEN": "known-other-token"}}
    replies += [client.post("/jobs", json=differs), trainer.post("/jobs", json=JOB), client.get("/jobs/demo")]
    replies += [trainer.post("/jobs/demo/weights", json={"source": SOURCE}), client.get("/jobs/demo/weights/updates")]
    replies += [client.get(f"/jobs/demo/logs/{unit['name']}") for unit in client.get("/jobs/demo").json()["units"]]
    assert [reply.status_code for reply in replies[-2:]] == [200, 200]
    return [reply.text for reply in replies]


def processes(client: httpx.Client) -> list[Path]:
    pids = [unit["pid"] for unit in client.get("/jobs/demo").json()["units"]]
    return [Path(f"/proc/{pid}") for pid in pids]


def environment_of(process: Path) -> dict[str, str]:
    pairs = (process / "environ").read_text().split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs if pair)


def check_processes(client: httpx.Client) -> None:
    """What a secret is for gets it by its environment, and nobody else does."""
    names = [unit["name"] for unit in client.get("/jobs/demo").json()["units"]]
    for name, process in zip(names, processes(client), strict=True):
        assert not KNOWN.search((process / "cmdline").read_text())
        found = {key: value for key, value in environment_of(process).items() if KNOWN.search(value)}
        assert found == {"prefill-0": IN_JOB, "decode-0": {**IN_JOB, **OWN}}.get(name, {}), name


def check_files(running: RunningControlPlane) -> None:
    """The record of a job holds its environment; nobody but its owner can read that."""
    for path in [running.log, *running.home.rglob("*")]:
        if not path.is_file():
            continue
        if path.name.startswith("headrace.db"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        else:
            assert not KNOWN.search(path.read_bytes().decode(errors="replace")), path


def rendered(folder: Path) -> str:
    (folder / "job.json").write_text(json.dumps(JOB))
    command = [sys.executable, "-m", "orchestrator", "render", str(folder / "job.json")]
    environment = {"HEADRACE_HOME": str(folder / "elsewhere"), "PATH": "/usr/bin:/bin"}
    shown = [
        subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        for more in ([], ["--json"])
    ]
    return "".join(done.stdout + done.stderr for done in shown)


def updates_recorded(home: Path) -> list[Any]:
    with sqlite3.connect(home / "headrace.db") as connection:
        rows = connection.execute("SELECT * FROM weight_updates").fetchall()
    connection.close()
    return rows


def test_secrets_are_kept(tmp_path: Path) -> None:
    with running_control_plane(tmp_path, ENVIRONMENT) as running, running.client() as client:
        trainer_headers = {"authorization": f"Bearer {ENVIRONMENT['HEADRACE_TRAINER_TOKEN']}"}
        with httpx.Client(base_url=running.url, headers=trainer_headers, trust_env=False) as trainer:
            told = answers(client, trainer)
        check_processes(client)
    assert [text for text in told if KNOWN.search(text)] == []
    assert not KNOWN.search(str(updates_recorded(running.home)))
    check_files(running)
    text = rendered(tmp_path)
    assert "(left out)" in text
    assert not KNOWN.search(text)
