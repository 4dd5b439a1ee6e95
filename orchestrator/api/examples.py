"""Bodies and answers as they look, for the OpenAPI document. Tests hold each against its model."""

from __future__ import annotations

import json
from typing import Any

Example = dict[str, Any]

JOB_FILE: Example = {
    "name": "demo",
    "model": {"path": "/models/SmolLM2-135M-Instruct", "served_names": ["smollm2"]},
    "engine": {"max_model_len": 2048, "block_size": 32},
    "kv_offload": {"type": "mooncake", "cpu": {"num_bytes": "256MiB"}},
    "roles": {"prefill": {"replicas": 1}, "decode": {"replicas": 1, "kv_offload": {"cpu": {"num_bytes": 0}}}},
    "router": {"port": 8000},
    "weights": {"transport": "path", "load_mode": "gpu_fetch"},
}

JOB_FILE_TOML = """\
name = "demo"
[model]
path = "/models/SmolLM2-135M-Instruct"
[kv_offload]
type = "mooncake"
cpu.num_bytes = "256MiB"
[roles.prefill]
[roles.decode]
kv_offload.cpu.num_bytes = 0
"""

PROBLEM: Example = {
    "type": "urn:headrace:problem:unusable-job-file",
    "title": "Unusable job file",
    "status": 422,
    "detail": "body cannot be used:\n  rooter: is no known key; did you mean 'router'?",
    "instance": "/jobs",
    "errors": [{"field": "rooter", "problem": "is no known key", "mend": "did you mean 'router'?"}],
}

EVENT: Example = {
    "seq": 4711,
    "at": 1767268809.5,
    "job": "demo",
    "process": "router",
    "kind": "gate",
    "text": "the gate is open",
    "data": {"gate": "open"},
}
EVENTS: Example = {"events": [EVENT], "next": 4711}
EVENT_STREAM = f"id: 4711\r\ndata: {json.dumps(EVENT)}\r\n\r\n"

VERDICT: Example = {
    "is_usable": False,
    "errors": [{"field": "model.path", "problem": "there is no folder /model", "mend": "give the folder"}],
    "warnings": [],
}

_LOGS = "/home/me/.local/state/headrace/jobs/demo/logs/20260101T120000Z-0a1b2c3d"

OPERATION: Example = {
    "id": "demo:1f3c9a2b:update:2",
    "job": "demo",
    "kind": "update",
    "target": "step-200",
    "state": "running",
    "text": "forward, load",
    "asked_at": 1767268800.0,
    "begun_at": 1767268800.2,
    "ended_at": None,
    "url": "/jobs/demo/weights/updates/2",
}
OPERATION_STREAM = f"data: {json.dumps(OPERATION)}\r\n\r\n"

JOB: Example = {
    "name": "demo",
    "phase": "ready",
    "reason": "",
    "operation": "demo:1f3c9a2b:start",
    "age_s": 75.2,
    "directory": "/home/me/.local/state/headrace/jobs/demo",
    "spec_hash": "6c1f0a5be9d2c7f4083d5a1e97b26d40c85e3fb1a792604dd8e1c35f7a0b9264",
    "model": "smollm2",
    "units": [
        {
            "name": name,
            "node": "n0",
            "state": "ready",
            "pid": pid,
            "seconds": 41.3,
            "detail": detail,
            "log": f"{_LOGS}/{name}.log",
        }
        for name, pid, detail in (
            ("mooncake-master", 4101, "port 19001 listening"),
            ("storage-prefill-0", 4120, "master_total_capacity_bytes 268435456 of 268435456"),
            ("prefill-0", 4133, "GET /health: 200"),
            ("decode-0", 4134, "GET /health: 200"),
            ("router", 4402, "GET /health: 200"),
        )
    ],
    "engines": [
        {"name": "prefill-0", "role": "prefill", "url": "http://127.0.0.1:19010", "state": "ready"},
        {"name": "decode-0", "role": "decode", "url": "http://127.0.0.1:19011", "state": "ready"},
    ],
    "router": {"url": "http://127.0.0.1:8000"},
    "weights": {"version": "step-200", "epoch": 3},
    "pool": {
        "master_address": "127.0.0.1:19001",
        "metrics_url": "http://127.0.0.1:19002/metrics",
        "capacity_bytes": 268435456,
        "cache_prefix": "demo-2f9a77c01b",
        "use": {"mounted_bytes": 268435456, "used_bytes": 6291456, "keys": 24},
        "use_unknown": "",
    },
    "prometheus_url": "http://127.0.0.1:19020",
    "warnings": [],
    "events": [EVENT],
}
JOBS: Example = {
    "jobs": [
        {
            "name": "demo",
            "phase": "ready",
            "reason": "",
            "age_s": 75.2,
            "directory": "/home/me/.local/state/headrace/jobs/demo",
            "processes": 5,
            "alive": 5,
        }
    ]
}

PLAN: Example = {
    "job": "demo",
    "spec": JOB_FILE,
    "model_name": "smollm2",
    "vllm_version": "0.32.0",
    "units": [
        {
            "name": "router",
            "node": "n0",
            "argv": ["/venv/bin/python", "-P", "-m", "router.main", "--config", "/jobs/demo/router.json"],
            "env": {"HEADRACE_TOKEN_FILE": "/jobs/demo/token"},
            "unset_env": [],
            "cwd": "/jobs/demo",
            "ports": [{"name": "http", "port": 8000, "setting": "router.port"}],
            "port_ranges": [],
            "probe": {"url": "http://127.0.0.1:8000/health", "token_file": None},
            "start_stage": 3,
            "ready_timeout_s": 30.0,
            "stop_grace_s": 5.0,
        }
    ],
    "files": [{"path": "/jobs/demo/router.json", "text": "{...}"}],
    "engines": [],
    "pool": None,
    "router": {
        "url": "http://127.0.0.1:8000",
        "internal_url": "http://127.0.0.1:19015",
        "config_file": "/jobs/demo/router.json",
        "token_file": "/jobs/demo/token",
    },
    "weights": {
        "in_place": True,
        "location": "/models/SmolLM2-135M-Instruct",
        "load_mode": "gpu_fetch",
        "strategy": "barrier",
        "in_flight": "readmit",
        "limits": {
            "prefetch_s": 900.0,
            "hold_s": 30.0,
            "in_flight_s": 120.0,
            "drain_s": 300.0,
            "pause_s": 60.0,
            "load_s": 600.0,
            "command_s": 30.0,
            "grace_s": 30.0,
            "again_s": 2.0,
            "tries": 3,
            "group_pairs": 1,
        },
    },
    "audit": {"every_s": None, "hash_algorithm": "sha256", "impossible": None},
    "prometheus_url": None,
    "ports": {"router internal": [19000, 1], "colocated-0 http": [19001, 1]},
    "offload_probe": "warn",
    "choices": [{"subject": "store transport", "value": "tcp, tuned", "reason": "one node"}],
    "findings": [],
}

SOURCE: Example = {"transport": "path", "path": "/checkpoints/step-200"}
PUSH: Example = {"source": SOURCE, "version": "step-200", "in_flight": "readmit"}
UPDATE: Example = {
    "number": 2,
    "operation": "demo:1f3c9a2b:update:2",
    "version": "step-200",
    "source": {**SOURCE, "version": "step-200"},
    "strategy": "barrier",
    "in_flight": "readmit",
    "load_mode": "gpu_fetch",
    "asked_at": 1767268800.0,
    "ended_at": 1767268809.5,
    "outcome": "committed",
    "why": "",
    "is_cancelled": False,
}
UPDATES: Example = {
    "updates": [UPDATE],
    "remarks": [{"at": 1767268900.0, "text": "decode-0 joined step-200 from its own source"}],
}
WEIGHTS: Example = {
    "served": {"version": "step-200", "epoch": 3, "source": UPDATE["source"]},
    "course": None,
    "to_purge": [],
    "last": UPDATE,
}
FINISHED: Example = {"message": "Weight update finished", "weight_version": "step-200", "update": 2}

AUDIT: Example = {
    "outcome": "agrees",
    "audited": [
        {
            "id": "chatcmpl-7f3a",
            "kind": "request",
            "epoch": 3,
            "version": "step-200",
            "replicas": {"prefill": "prefill-0", "decode": "decode-0"},
            "prompt_tokens": 96,
            "cached_tokens": 64,
            "judgement": {
                "outcome": "agrees",
                "compared": 8,
                "off_by": 0.0002,
                "at": 3,
                "noise": 0.0001,
                "allowed": 0.001,
            },
            "skipped": "",
            "finding": "",
            "keys": [],
            "keys_unknown": "",
        }
    ],
}
