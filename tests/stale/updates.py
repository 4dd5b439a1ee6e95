"""Ways to bring new weights to a running job."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx

from connectors.engine_client import CommandOrder, EngineClient
from tests.e2e.harness import CALL_TIMEOUT_S, engine_url, internal_url, job_token, router_state
from tests.stack.weights.checkpoints import path_source
from tests.stale.judge import FIRST_VERSION
from tests.stale.schedule import InFlight, Strategy


class UpdateFailed(Exception):
    """The job serves the version that it had before."""


class Updater(Protocol):
    def push(self, version: str, checkpoint: Path, strategy: Strategy, in_flight: InFlight) -> None:
        """Returns when the job serves this version. Blocking.

        Raises:
            UpdateFailed: the checkpoint cannot be loaded.
        """


class Barrier:
    """By hand, over the router's internal port and the engines' own routes; always a barrier."""

    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status
        self._headers = job_token(status)
        self._router = internal_url(status)
        token = str(Path(status["directory"], "token"))
        names = [engine["name"] for engine in status["engines"]]
        self._engines = {name: EngineClient(engine_url(status, name), token, CALL_TIMEOUT_S) for name in names}
        self._update, self._step = 0, 0
        self._version = FIRST_VERSION

    def push(self, version: str, checkpoint: Path, strategy: Strategy, in_flight: InFlight) -> None:
        self._update, self._step = self._update + 1, 0
        instances = {name: client.fence().instance for name, client in self._engines.items()}
        epoch = max(int(each) for each in router_state(self._status)["epochs"]) + 1
        mode = "keep" if in_flight == "keep" else "wait"
        self._tell_router("/gate", gate="holding", timeout_s=60)
        self._tell_router("/in_flight", mode=in_flight, timeout_s=60)
        self._on_all("prefill", lambda name: self._call(name, f"/pause?mode={mode}&clear_cache=false"))
        self._tell_router("/gate", gate="frozen", timeout_s=60)
        self._on_all("decode", lambda name: self._call(name, f"/pause?mode={mode}&clear_cache=false"))
        order = self._order()
        source = path_source(checkpoint, version)
        answers = self._on_all("", lambda name: self._engines[name].load_weights(instances[name], source, order))
        failed = [answer.error for answer in answers if not answer.ok]
        if not failed:
            self._version = version
        replicas = [{"name": name, "instance": instance} for name, instance in instances.items()]
        self._tell_router("/epochs", epoch=epoch, version=self._version, replicas=replicas)
        order = self._order()
        self._on_all("", lambda name: self._engines[name].confirm_epoch(instances[name], epoch, order))
        self._on_all("", lambda name: self._call(name, "/resume"))
        self._tell_router("/gate", gate="open")
        if failed:
            raise UpdateFailed("; ".join(failed))

    def _order(self) -> CommandOrder:
        self._step += 1
        return CommandOrder(update=self._update, attempt=0, step=self._step)

    def _tell_router(self, path: str, **fields: object) -> None:
        self._step += 1
        body = {"update": self._update, "attempt": 0, "step": self._step, **fields}
        self._post(f"{self._router}{path}", body)

    def _call(self, name: str, path: str) -> None:
        self._post(f"{engine_url(self._status, name)}{path}", None)

    def _post(self, url: str, body: object) -> None:
        reply = httpx.post(url, json=body, headers=self._headers, timeout=CALL_TIMEOUT_S, trust_env=False)
        assert reply.is_success, f"{url}: {reply.status_code} {reply.text[:500]}"

    def _on_all(self, role: str, act: Callable[[str], Any]) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(act, [name for name in self._engines if name.startswith(role)]))
