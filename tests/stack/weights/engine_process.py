"""A real engine with our plug-in as a child process, driven over HTTP as the control plane and the router drive it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.engine_client import CommandOrder, EngineClient, LoadOptions, WeightsAnswer
from connectors.engine_env import resting_environment
from connectors.vllm_plugin.weights.settings import BACKEND, SETTINGS_VARIABLE, WORKER_EXTENSION
from deploy.logs import tail
from orchestrator.supervisor.log_cause import likely_cause

REPOSITORY = Path(__file__).parents[3]
MODELS = REPOSITORY / ".cache" / "models"
BOOT_S = 240
CALL_S = 120
STOP_S = 20
PROMPTS = tuple(tuple((7 * row + 3 * column + row * column) % 250 for column in range(24)) for row in range(20))
"""Token ids of the byte tokenizer; all different."""
NEW_TOKENS = 6


@dataclass
class EngineProcess:
    """One life of one engine."""

    url: str
    folder: Path
    ranks: int
    process: subprocess.Popen[bytes]
    client: EngineClient
    epoch: int = 0
    step: int = 0
    _headers: dict[str, str] = field(default_factory=dict)

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text(encoding="ascii")

    @property
    def instance(self) -> str:
        return self.client.fence().instance

    def next_order(self) -> CommandOrder:
        self.step += 1
        return CommandOrder(update=1, attempt=0, step=self.step)

    def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        given = {"authorization": f"Bearer {self.token}", **(headers or {})}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=given, timeout=CALL_S, trust_env=False)

    def pause(self) -> None:
        assert self.call("POST", "/pause?mode=abort&clear_cache=false").is_success

    def resume(self) -> None:
        assert self.call("POST", "/resume").is_success

    def load(self, source: Mapping[str, Any], **options: Any) -> WeightsAnswer:
        """Without any word about epochs: `serve_next_epoch` opens the fence again."""
        self.pause()
        answer = self.client.load_weights(self.instance, source, self.next_order(), LoadOptions(**options))
        self.resume()
        return answer

    def serve_next_epoch(self) -> None:
        self.epoch += 1
        self.client.confirm_epoch(self.instance, self.epoch, self.next_order())

    def update(self, source: Mapping[str, Any], **options: Any) -> WeightsAnswer:
        """A load that must succeed, and an open fence after it."""
        answer = self.load(source, **options)
        assert answer.ok, answer.error
        self.serve_next_epoch()
        return answer

    def complete(self, prompts: Sequence[Sequence[int]] = PROMPTS, **more: Any) -> httpx.Response:
        """As the router sends it."""
        body = {
            "model": "tiny",
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "cache_salt": f"salt{self.epoch}",
            **more,
        }
        headers = {
            "x-headrace-instance": self.instance,
            "x-headrace-epoch": str(self.epoch),
            "x-headrace-salted": "1",
        }
        return self.call("POST", "/v1/completions", body, headers)

    def logprobs(self) -> list[float]:
        """Of the tokens of all prompts and of what follows them."""
        reply = self.complete(prompt_logprobs=1)
        assert reply.status_code == 200, reply.text
        found: list[float] = []
        for choice in sorted(reply.json()["choices"], key=lambda choice: choice["index"]):
            prompt = PROMPTS[choice["index"]]
            for token, ranked in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True):
                found.append(ranked[str(token)]["logprob"])
            found += choice["logprobs"]["token_logprobs"]
        return found

    def weight_version(self) -> str:
        version: str = self.call("GET", "/weight_info").json()["weight_version"]
        return version

    def stop(self) -> None:
        self.client.__exit__(None, None, None)
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """With all its processes, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def engine(
    model: Path, folder: Path, port: int, *, ranks: int = 1, settings: Mapping[str, Any] | None = None, cores: str = ""
) -> Iterator[EngineProcess]:
    """A running engine with an open fence; its log is `folder`/engine.log."""
    started = start_engine(model, folder, port, ranks=ranks, settings=settings, cores=cores)
    try:
        wait_ready(started)
        started.serve_next_epoch()
        yield started
    finally:
        started.stop()


def start_engine(
    model: Path,
    folder: Path,
    port: int,
    *,
    ranks: int = 1,
    settings: Mapping[str, Any] | None = None,
    cores: str = "",
    arguments: Mapping[str, object] | None = None,
    variables: Mapping[str, str] | None = None,
) -> EngineProcess:
    """Begin to start one; `cores`: which CPU cores its ranks compute on, as vLLM spells them; `arguments` and
    `variables`: further ones of its command line and environment, or others than usual."""
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / "token"
    token.write_text(secrets.token_hex(16), encoding="ascii")
    environment = {
        **os.environ,
        **resting_environment("cpu"),
        "PYTHONPATH": str(REPOSITORY),
        "HEADRACE_TOKEN_FILE": str(token),
        SETTINGS_VARIABLE: json.dumps(dict(settings or {})),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores or "|".join(str(core) for core in range(ranks)),
        "TORCHDYNAMO_DISABLE": "1",
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
        "HF_HUB_OFFLINE": "1",
        **(variables or {}),
    }
    options = _arguments(model, port, ranks, arguments or {})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    client = EngineClient(url, str(token), timeout_s=CALL_S)
    return EngineProcess(url=url, folder=folder, ranks=ranks, process=process, client=client)


def _arguments(model: Path, port: int, ranks: int, more: Mapping[str, object]) -> list[str]:
    options: dict[str, object] = {
        "--model": model,
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": port,
        "--tensor-parallel-size": ranks,
        "--dtype": "float32",
        "--max-model-len": 256,
        "--max-num-seqs": 8,
        "--block-size": 32,
        "--kv-cache-memory-bytes": 64 << 20,
        "--middleware": "connectors.vllm_plugin.fence.Fence",
        "--worker-extension-cls": WORKER_EXTENSION,
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        "--distributed-executor-backend": "mp" if ranks > 1 else "uni",
        **more,
    }
    return ["--enforce-eager", *(str(part) for option in options.items() for part in option)]


def wait_ready(started: EngineProcess) -> None:
    """Says in one line why an engine did not come up; the end of its log is printed."""
    deadline = time.monotonic() + BOOT_S
    while True:
        if started.process.poll() is not None or time.monotonic() > deadline:
            log = tail(started.folder / "engine.log", 400)
            print(*log[-60:], sep="\n")
            state = "still starting" if started.process.poll() is None else "has ended"
            pytest.fail(f"the engine {state}: {likely_cause(log)}", pytrace=False)
        try:
            if started.call("GET", "/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
