"""An engine's control routes, as far as the control plane needs them. Blocking; one client per engine.

Every call carries the job's token, which the engine's fence asks for (`vllm_plugin/fence.py`). The data plane has a
client of its own (`router/io/upstream.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from connectors.vllm_plugin.fence_rules import (
    EPOCH_HEADER,
    FENCE_PATH,
    HANDOFFS_HEADER,
    INSTANCE_HEADER,
    ORDER_HEADER,
    SALTED_HEADER,
    WEIGHTS_PATH,
)
from connectors.vllm_plugin.pool_keys import epoch_salt
from connectors.vllm_plugin.weights.verdict import CommandName, RankReport, WeightCommand

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
"""Prompt tokens that came from a connector instead of being computed."""
SMALLEST_VOCABULARY = 200
"""Token ids up to it are in every model's."""
CLEAR_EVERY_S = 0.2
"""How often an engine is asked again to clear a cache of which it still holds blocks."""
SHOWN = 300
"""Characters of an unexpected answer that an error repeats."""
ENGINE_MARGIN_S = 150.0
"""Beyond the limits that a weight command sets: a little more than the engine itself gives its ranks."""
_LIMITS = ("limit_s", "timeout_s")
REFUSALS = frozenset({*range(400, 500), 501, 503})
"""Statuses with which a fence says that a command was not obeyed. Behind any other error it may have been."""


class EngineCallFailed(Exception):
    """The engine did not answer, or not with success; the text says which route and what came."""


class EngineRefused(EngineCallFailed):
    """The engine's fence has said that it does not do what was asked."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """vllm:cache_config_info: what an engine made of the KV settings it was given."""

    block_size: int
    cache_dtype: str


@dataclass(frozen=True, kw_only=True)
class CommandOrder:
    """Which step of which attempt at which update a command belongs to; whoever gets it refuses an older one."""

    update: int
    attempt: int
    step: int

    def next_step(self) -> CommandOrder:
        return replace(self, step=self.step + 1)


@dataclass(frozen=True, kw_only=True)
class FenceView:
    """What an engine's fence says of itself, as far as the control plane looks at it."""

    instance: str
    """This life of the engine."""
    epoch: int | None
    """The confirmed one; None while the fence is closed."""
    version: str | None
    """Of the weights; None where they are those that the engine started with."""
    unfit: str
    """Why it must not serve; empty where it may."""
    lost: bool
    """Only a restart makes it fit."""
    running: str
    """The command about weights that is being carried out; empty while none is."""
    order: CommandOrder | None
    """Of the last command that it took."""

    def next_order(self) -> CommandOrder:
        """For who follows up on that command."""
        return CommandOrder(update=0, attempt=0, step=0) if self.order is None else self.order.next_step()


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How weights are to be loaded. None: as the engine is set, or as it does anyway."""

    mode: str | None = None
    """`gpu_fetch` or `cpu_prefetch`."""
    check_finite: bool | None = None
    timeout_s: float | None = None
    """Bound of each step that waits for the source."""
    limit_s: float | None = None
    """Bound of the whole load."""


@dataclass(frozen=True, kw_only=True)
class WeightsAnswer:
    """What an engine says after a command about weights: a failure that its ranks agree on is an answer too."""

    ok: bool
    error: str
    version: str | None
    """Of the weights in its parameters; None where it has those that it started with."""
    unfit: str
    """Why it must not serve; empty where it may."""
    ranks: tuple[RankReport, ...]

    @property
    def served(self) -> Mapping[str, Any] | None:
        """The source under which peers can read this engine's weights: the same on all ranks."""
        return self.ranks[0].served if self.ranks else None


class EngineClient:
    """One engine's routes. Every method raises `EngineCallFailed` where the engine does not do what was asked."""

    def __init__(self, url: str, token_file: str, timeout_s: float = 30.0) -> None:
        """Raises `EngineCallFailed` where the token cannot be read."""
        self._url = url
        try:
            token = Path(token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise EngineCallFailed(f"the token of {url} cannot be read: {error}") from error
        headers = {"authorization": f"Bearer {token}"}
        # Loading certificates costs more than a request; without TLS in the address there is nothing to verify.
        encrypted = url.startswith("https:")
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=encrypted)

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def cache_config(self) -> CacheConfig:
        """What the engine reports of its KV cache.

        Raises:
            EngineCallFailed: no answer, or none that reports it.
        """
        for sample in self._samples():
            if sample.name == "vllm:cache_config_info":
                try:
                    return CacheConfig(
                        block_size=int(sample.labels["block_size"]), cache_dtype=sample.labels["cache_dtype"]
                    )
                except (KeyError, ValueError) as error:
                    text = f"GET {self._url}/metrics: vllm:cache_config_info has no usable {error}"
                    raise EngineCallFailed(text) from error
        raise EngineCallFailed(f"GET {self._url}/metrics: no vllm:cache_config_info")

    def counter(self, name: str) -> float:
        """Sum of a counter over its label sets; 0 where the engine has not counted yet. `name` without "_total"."""
        return sum(sample.value for sample in self._samples() if sample.name == f"{name}_total")

    def reset_local_cache(self) -> bool | None:
        """Clear the engine's own prefix cache and nothing of the pool.

        False: refused while blocks are held; retry. None: a success that does not say whether anything was cleared,
        as older versions answer in either case (A25).
        """
        reply = self._call("POST", "/reset_prefix_cache", params={"reset_external": "false"})
        try:
            answer = reply.json()
        except ValueError:
            return None
        success = answer.get("success") if isinstance(answer, dict) else None
        return success if isinstance(success, bool) else None

    def fence(self) -> FenceView:
        """What the engine's fence says of itself.

        Raises:
            EngineCallFailed: no answer, or that of an engine without a fence.
        """
        return self._fence_view(self._call("GET", FENCE_PATH))

    def confirm_epoch(self, instance: str, epoch: int | None, order: CommandOrder) -> FenceView:
        """Open the fence of this life of the engine for requests of `epoch`; None closes it.

        Raises:
            EngineCallFailed: no answer.
            EngineRefused: another life of the engine, or one that was given a later command.
        """
        command = {"instance": instance, "epoch": epoch, **asdict(order)}
        return self._fence_view(self._call("POST", FENCE_PATH, json=command))

    def pause(self, instance: str, order: CommandOrder, timeout_s: float, *, drops_handoffs: bool = False) -> None:
        """Stop computing. A prefill engine answers once no handoff of it is unread any more; with `drops_handoffs` it
        gives up those that are: for when no leg is left that could read one.

        What still runs is kept: an abort that meets a transfer can kill the engine (A27), and whoever wants requests
        ended ends them before. The caches stay: those of older epochs are never hit, and vLLM's wipe is the whole
        master's.
        """
        params = {"mode": "keep", "clear_cache": "false"}
        headers = _order_headers(instance, order) | ({HANDOFFS_HEADER: "drop"} if drops_handoffs else {})
        self._call("POST", "/pause", params=params, headers=headers, timeout_s=timeout_s)

    def resume(self, instance: str, order: CommandOrder) -> None:
        self._call("POST", "/resume", headers=_order_headers(instance, order))

    def is_paused(self) -> bool:
        """What the engine itself says, not its fence; true already while a pause waits for its end."""
        reply = self._call("GET", "/is_paused")
        try:
            return bool(reply.json()["is_paused"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineCallFailed(f"GET {self._url}/is_paused: {reply.text[:SHOWN]}") from error

    def prefetch_weights(
        self, instance: str, source: Mapping[str, Any], order: CommandOrder, options: LoadOptions | None = None
    ) -> WeightsAnswer:
        """Begin to copy a version into host memory. Returns at once; `weights` says how far it is."""
        return self._weights_command("prefetch", instance, order, _load_body(source, options))

    def load_weights(
        self, instance: str, source: Mapping[str, Any], order: CommandOrder, options: LoadOptions | None = None
    ) -> WeightsAnswer:
        """Put a version into the parameters of a paused engine. Returns when all ranks have one verdict, which the
        answer tells. The epoch has to be confirmed anew after a success.

        Raises:
            EngineCallFailed: no answer, or the command was not obeyed at all.
        """
        return self._weights_command("load", instance, order, _load_body(source, options))

    def serve_weights(self, instance: str, order: CommandOrder) -> WeightsAnswer:
        """Let peers read this engine's weights: `served` of the answer is their source. Ends with the next load."""
        return self._weights_command("serve", instance, order, {})

    def weights(self) -> WeightsAnswer:
        """What every rank says of its weights."""
        return self._weights_answer(self._call("GET", f"{WEIGHTS_PATH}state"))

    def _weights_command(
        self, name: CommandName, instance: str, order: CommandOrder, fields: Mapping[str, Any]
    ) -> WeightsAnswer:
        body = {"instance": instance, **asdict(order), **fields}
        # The engine bounds its work itself, and says so; giving up before it would leave the outcome open.
        limits = WeightCommand(name=name, call="", **{each: fields[each] for each in _LIMITS if each in fields})
        within_s = limits.limit_s + 2 * limits.timeout_s + ENGINE_MARGIN_S
        reply = self._call("POST", f"{WEIGHTS_PATH}{name}", json=body, timeout_s=within_s, accepted=(200, 500))
        return self._weights_answer(reply)

    def _weights_answer(self, reply: httpx.Response) -> WeightsAnswer:
        try:
            answer = reply.json()
            reports = tuple(RankReport.from_wire(report) for report in answer["ranks"])
            return WeightsAnswer(
                ok=answer["ok"],
                error=answer["error"],
                version=answer["version"],
                unfit=answer["unfit"],
                ranks=reports,
            )
        except (ValueError, KeyError, TypeError) as error:
            text = f"{reply.request.method} {reply.url} answered {reply.status_code}: {reply.text[:SHOWN]}"
            raise EngineCallFailed(text) from error

    def _fence_view(self, reply: httpx.Response) -> FenceView:
        try:
            answer = reply.json()
            return FenceView(
                instance=str(answer["instance"]),
                epoch=answer["epoch"],
                version=answer["version"],
                unfit=answer["unfit"],
                lost=answer["lost"],
                running=answer["running"],
                order=None if answer["order"] is None else _order(*answer["order"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EngineCallFailed(f"{self._url}{FENCE_PATH}: no fence answered: {reply.text[:SHOWN]}") from error

    def complete(self, fence: FenceView, model: str, prompt: Sequence[int], salt: str) -> int:
        """Compute one token after `prompt` (token ids), as a request of the life and epoch that `fence` shows, salted
        for that epoch. Returns the prompt tokens that were cached.

        Raises:
            EngineCallFailed: no answer, or an error.
        """
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": epoch_salt(fence.epoch or 0, salt),
        }
        headers = {INSTANCE_HEADER: fence.instance, EPOCH_HEADER: str(fence.epoch), SALTED_HEADER: "1"}
        reply = self._call("POST", "/v1/completions", json=body, headers=headers)
        try:
            usage = reply.json().get("usage") or {}
            return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (ValueError, TypeError, AttributeError) as error:
            raise EngineCallFailed(f"POST {self._url}/v1/completions: no completion: {reply.text[:SHOWN]}") from error

    def _samples(self) -> list[Sample]:
        text = self._call("GET", "/metrics").text
        try:
            return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except ValueError as error:
            raise EngineCallFailed(f"GET {self._url}/metrics: no Prometheus text: {error}") from error

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        accepted: Sequence[int] = (),
    ) -> httpx.Response:
        try:
            timeout = self._http.timeout if timeout_s is None else timeout_s
            reply = self._http.request(method, path, json=json, params=params, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise EngineCallFailed(f"{method} {self._url}{path}: {cause}") from error
        if not reply.is_success and reply.status_code not in accepted:
            kind = EngineRefused if reply.status_code in REFUSALS else EngineCallFailed
            raise kind(f"{method} {self._url}{path} answered {reply.status_code}: {reply.text[:SHOWN]}")
        return reply


def _order(update: int, attempt: int, step: int) -> CommandOrder:
    return CommandOrder(update=update, attempt=attempt, step=step)


def _order_headers(instance: str, order: CommandOrder) -> dict[str, str]:
    return {INSTANCE_HEADER: instance, ORDER_HEADER: f"{order.update}.{order.attempt}.{order.step}"}


def _load_body(source: Mapping[str, Any], options: LoadOptions | None) -> dict[str, Any]:
    given = {} if options is None else asdict(options)
    return {"source": dict(source), **{name: value for name, value in given.items() if value is not None}}
