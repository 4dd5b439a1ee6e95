"""Drives real jobs the way a user does: through the `headrace` command and the job's own URLs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

UP_TIMEOUT_S = 900
CALL_TIMEOUT_S = 300
SETTLE_S = 60
PAIR = "pair"
"""The job that several modules share; see conftest.py."""
JOB_PROCESSES = ("mooncake-master", "storage-prefill-0", "prefill-0", "decode-0", "router", "prometheus")
"""Of `split_job`."""
GONE_WITHIN_S = 10
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"

ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
}
POOL_BYTES = 64 << 20
PORTS = {"base": int(os.environ.get("HEADRACE_TEST_PORTS", "12000"))}
"""Apart from the ports of tests/engines and of all that picks free ones, and, by the variable, from those of jobs of
another pytest: these tests run at the same time."""
PATIENT_HANDOFF = {"lease": 120}
"""Seconds, for a fleet that is worked hard on a busy machine. A decode engine keeps a lease up as it steps, and not
before it has connected to the prefill engine, which was seen to take a minute the first time; what it reads after the
lease may be another request's, and no reply says so. Not longer: a prefill engine steps without pause while a handoff
is unread."""


def job_table(name: str, model: Path, router_port: int, **tables: Any) -> dict[str, Any]:
    """A job file for the tiny model, as a table; `tables` come on top."""
    return {
        "name": name,
        "model": {"path": str(model), "served_names": ["tiny"]},
        "engine": dict(ENGINE),
        "pool": {"local_buffer_bytes": "32MiB"},
        "router": {"port": router_port},
        "ports": PORTS,
        **tables,
    }


def split_job(name: str, model: Path, router_port: int, **tables: Any) -> dict[str, Any]:
    """The main job: prefill lends the pool its capacity, decode joins at zero."""
    roles = {"prefill": {}, "decode": {"kv_offload": {"cpu": {"num_bytes": 0}}}}
    offload = {"type": "mooncake", "cpu": {"num_bytes": POOL_BYTES}}
    return job_table(name, model, router_port, **{"kv_offload": offload, "roles": roles, **tables})


@dataclass(frozen=True)
class Headrace:
    """The command line with a state folder of its own."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HEADRACE_HOME": str(self.home)}

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *arguments]

    def run(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def write_job(self, table: dict[str, Any]) -> Path:
        path = self.home / f"{table['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table), encoding="utf-8")
        return path

    def up(self, table: dict[str, Any]) -> dict[str, Any]:
        """Start a job, and its status once it serves."""
        done = self.run("up", str(self.write_job(table)))
        assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
        return self.status(table["name"])

    def status(self, name: str) -> dict[str, Any]:
        done = self.run("status", name, "--json", timeout_s=60)
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def down(self, name: str) -> None:
        done = self.run("down", name, timeout_s=120)
        assert done.returncode == 0, done.stderr


def engine_url(status: dict[str, Any], name: str) -> str:
    return next(str(engine["url"]) for engine in status["engines"] if engine["name"] == name)


def job_token(status: dict[str, Any]) -> dict[str, str]:
    """The header that every route of the job's engines asks for."""
    token = Path(status["directory"], "token").read_text(encoding="ascii").strip()
    return {"authorization": f"Bearer {token}"}


def router_state(status: dict[str, Any]) -> dict[str, Any]:
    """What the router says of itself on its internal port."""
    reply = httpx.get(f"{internal_url(status)}/state", headers=job_token(status), timeout=30, trust_env=False)
    state: dict[str, Any] = reply.raise_for_status().json()
    return state


def set_gate(status: dict[str, Any], gate: str) -> None:
    """Move the router's gate, in the name of the update that moved it last."""
    update, attempt, step = router_state(status)["order"]
    command = {"gate": gate, "update": update, "attempt": attempt, "step": step}
    url = f"{internal_url(status)}/gate"
    httpx.post(url, json=command, headers=job_token(status), timeout=30, trust_env=False).raise_for_status()


def internal_url(status: dict[str, Any]) -> str:
    settings = json.loads(Path(status["directory"], "router.json").read_text(encoding="utf-8"))
    return f"http://{settings['internal_host']}:{settings['internal_port']}"


def metric(url: str, name: str, headers: dict[str, str] | None = None, **labels: str) -> float:
    """Sum of a metric's samples that have these labels, at a /metrics URL; 0 where there is none."""
    text = httpx.get(url, headers=headers, timeout=30, trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def wait_until(what: str | Callable[[], str], done: Callable[[], bool], timeout_s: float = SETTLE_S) -> None:
    """Look until `done`, more seldom the longer it takes: looks cost what is looked at time. Fails in words, which a
    callable `what` makes at that moment."""
    began = time.monotonic()
    while not done():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            awaited = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s:.0f} s: {awaited}")
        time.sleep(min(1.0, 0.2 + waited_s / 10))


def clear_local_cache(url: str, headers: dict[str, str]) -> None:
    """Clear an engine's own prefix cache and nothing of the pool; refused while saves hold blocks."""

    def cleared() -> bool:
        params = {"reset_external": "false"}
        reply = httpx.post(f"{url}/reset_prefix_cache", params=params, headers=headers, timeout=30, trust_env=False)
        return reply.status_code == 200 and bool(reply.json()["success"])

    # A handoff that nobody reads, because its client left, keeps its blocks for its lease.
    wait_until(f"{url} clears its own cache", cleared, PATIENT_HANDOFF["lease"] + SETTLE_S)


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prefill: str
    decode: str


def complete(router_url: str, prompt: Sequence[int], max_tokens: int, session: str) -> Answer:
    """Greedy completion of a prompt of token ids through the router."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    reply = httpx.post(
        f"{router_url}/v1/completions",
        json=body,
        headers={"x-session-id": session},
        timeout=CALL_TIMEOUT_S,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return Answer(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(choice["logprobs"]["token_logprobs"]),
        prefill=reply.headers.get("x-headrace-prefill", ""),
        decode=reply.headers.get("x-headrace-decode", ""),
    )


def run_id(headrace: Headrace, name: str) -> str:
    with sqlite3.connect(headrace.home / "headrace.db") as database:
        return str(database.execute("SELECT run_id FROM jobs WHERE name = ?", (name,)).fetchone()[0])


def run_pids(run_id: str) -> set[int]:
    """Every living process that carries a run's mark in its environment, found without Headrace's help."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"HEADRACE_RUN_ID={run_id}".encode() in environment and state != "Z":
            found.add(int(entry.name))
    return found


def down_leaves_nothing(headrace: Headrace, name: str) -> None:
    mark = run_id(headrace, name)
    headrace.down(name)
    deadline = time.monotonic() + GONE_WITHIN_S
    while run_pids(mark):
        assert time.monotonic() < deadline, run_pids(mark)
        time.sleep(0.2)


def unit_pid(status: dict[str, Any], name: str) -> int:
    return next(int(unit["pid"]) for unit in status["units"] if unit["name"] == name)
