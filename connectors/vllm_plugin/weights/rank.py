"""One rank's weights: its commands and what it remembers between them. `answer` never raises.

`extension.py` and `backend.py` call it on vLLM's worker thread, between two steps of the engine; `verdict.py` has the
words. A load opens the version on every rank, all agree, then each fills its parameters, all agree again. So what
fails before the first agreement leaves old weights whole everywhere; what fails after it leaves the engine torn, on
all ranks, until a load succeeds.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from connectors.vllm_plugin.weights import layers
from connectors.vllm_plugin.weights.agreement import AgreementLost, EngineRanks, engine_ranks
from connectors.vllm_plugin.weights.load import Load
from connectors.vllm_plugin.weights.numbers import LoadNumbers, PeakMemory
from connectors.vllm_plugin.weights.peers import PeerService
from connectors.vllm_plugin.weights.planner import Planner
from connectors.vllm_plugin.weights.prefetching import Prefetching, StillReading
from connectors.vllm_plugin.weights.settings import LoadMode, WeightSettings, read_settings
from connectors.vllm_plugin.weights.transports import make_transport
from connectors.vllm_plugin.weights.verdict import LoadResult, RankReport, WeightCommand
from connectors.weights.source import Fetch, FetchError, SourceInfo, Transport

AGREE_MARGIN_S = 15.0
"""On top of what a rank that keeps its limits can be late."""

_log = logging.getLogger("vllm.headrace.weights")


class CommandRefused(Exception):
    """The command must not be carried out; nothing was changed."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a rank tells the others before it writes."""

    error: str
    names: tuple[str, ...]
    manifest: str
    """Names the tensors that its plan is for; empty where there is an error."""
    is_checked: bool
    """Whether what the ranks take together by that plan is known to be whole tensors."""
    stamps: Mapping[str, str]
    """Of what it opened."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a rank tells the others after it wrote, or failed to."""

    error: str
    names: tuple[str, ...]
    wrote: bool


class RankWeights:
    """The weights of one rank of an engine."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, ranks: EngineRanks, settings: WeightSettings) -> None:
        """Raises ValueError where the engine's weights cannot be replaced as `settings` say."""
        self._model = model
        self._dtype = dtype
        self._ranks = ranks
        self._settings = settings
        self._planner = Planner(model)
        self._peers = PeerService(ranks, settings.host)
        self._name = uuid.uuid4().hex
        self._transports: dict[Any, Transport] = {}
        self._prefetching = Prefetching(self._planner, settings)
        self._report = RankReport(call="", rank=ranks.rank, ranks=ranks.size, ok=True)
        self._quantized = [name for name, module in model.named_modules() if layers.is_quantized(module)]
        self._check_mode(settings.mode)
        for source in settings.sources:
            self._get_ready(source)

    def answer(self, wire: Mapping[str, Any]) -> dict[str, Any]:
        """Carry a command out and report. Never raises."""
        call = str(wire.get("call", ""))
        ok, error = False, ""
        try:
            self._obey(WeightCommand.from_wire(wire))
            ok = True
        except AgreementLost as lost:
            self._report.lost = error = str(lost)
        except (CommandRefused, FetchError) as refused:
            error = str(refused)
        except Exception as unexpected:
            _log.exception("a weight command failed in a way that was not foreseen")
            error = f"{type(unexpected).__name__}: {unexpected}"
        if not ok:
            # Exceptions keep the frames that they came through, often in cycles, and those a copy of the weights.
            gc.collect()
        return self._reported(call, ok, error).to_wire()

    def close(self) -> None:
        """Let go of everything outside the model."""
        with suppress(StillReading):
            self._prefetching.give_up()
            self._drop_transports()
            self._prefetching.drop_copy()
        self._peers.close()

    def _reported(self, call: str, ok: bool, error: str) -> RankReport:
        report = self._report
        report.call, report.ok, report.error = call, ok, error
        self._prefetching.describe(report)
        report.served = self._peers.source
        return report

    def _obey(self, command: WeightCommand) -> None:
        if command.name == "state":
            return
        if self._report.lost:
            raise CommandRefused(f"this life of the engine is lost: {self._report.lost}")
        self._accept(command)
        if command.name == "prefetch":
            self._start_prefetch(command)
        elif command.name == "load":
            self._load(command)
        elif command.name == "reset":
            self._prefetching.give_up()
            self._report.last_load = None
        elif command.name == "serve":
            self._serve()
        else:
            raise CommandRefused(f"{command.name!r} is no command")

    def _accept(self, command: WeightCommand) -> None:
        if command.order is None:
            return
        order, last = list(command.order), self._report.order
        if last is not None and order < last:
            raise CommandRefused(f"the command is {order}, and {last} was obeyed before: it comes too late")
        self._report.order = order

    # Loading

    def _load(self, command: WeightCommand) -> None:
        started = time.perf_counter()
        peak, device_before = PeakMemory(), _start_device_peak()
        version = _version(command)
        self._report.last_load = LoadResult(ok=False, version=version, error="not finished")
        numbers = LoadNumbers()
        try:
            numbers = self._open_and_fill(command)
        except (FetchError, AgreementLost) as error:
            names = list(error.tensors) if isinstance(error, FetchError) else []
            self._report.last_load = LoadResult(ok=False, version=version, error=str(error), names=names)
            # What a failed load leaves in a transport is not worth trusting; the next load makes it anew. Unless a
            # thread is still in it, for which the next load waits.
            with suppress(StillReading):
                self._prefetching.give_up()
                self._drop_transports()
            raise
        finally:
            numbers.seconds = time.perf_counter() - started
            numbers.peak_extra_bytes = peak.extra_bytes()
            if device_before is not None:
                numbers.peak_extra_device_bytes = _device_peak() - device_before
        self._report.version, self._report.torn = version, ""
        self._report.last_load = LoadResult(ok=True, version=version, numbers=_figures(numbers))
        _log.info("weights: version %s loaded, %d bytes in %.3f s", version, numbers.bytes, numbers.seconds)

    def _open_and_fill(self, command: WeightCommand) -> LoadNumbers:
        deadline = time.monotonic() + command.limit_s
        started = time.perf_counter()
        fetch: Fetch | None = None
        failure: Exception | None = None
        try:
            self._peers.stop()
            fetch = self._open(command, deadline)
        except Exception as error:
            failure = error
        opened_s = time.perf_counter() - started
        try:
            self._agree_to_write(command, deadline, failure, {} if fetch is None else fetch.stamps)
            assert fetch is not None
            load = Load(
                self._planner.plan,
                self._planner.rooms,
                fetch,
                check_finite=command.check_finite,
                attention_dtype=self._dtype,
            )
            self._fill(load, command, deadline)
        finally:
            if fetch is not None:
                fetch.close()
        if self._prefetching.has(command):
            load.numbers.prefetch_wait_s = opened_s
        self._prefetching.done()
        load.numbers.open_s, load.numbers.plan_s = opened_s, self._planner.seconds
        return load.numbers

    def _open(self, command: WeightCommand, deadline: float) -> Fetch:
        mode: LoadMode | str = command.mode or self._settings.mode
        self._check_mode(mode)
        if mode == "gpu_fetch" or not self._prefetching.has(command):
            self._prefetching.give_up()
            self._await_reads(command.timeout_s)
        if mode == "gpu_fetch":
            # The source is waited for twice before the first agreement: no later than the others wait for this rank.
            timeout_s = min(command.timeout_s, _left(deadline))
            return self._transport(command.source).open(command.source, self._planner.groups, timeout_s=timeout_s)
        if not self._prefetching.has(command):
            self._start_prefetch(command)
        try:
            return self._prefetching.fetch(_left(deadline) + command.timeout_s)
        except FetchError:
            if not self._prefetching.is_misfit:
                raise
        # Other tensors than before: with a new copy it is only slower.
        self._start_prefetch(command)
        return self._prefetching.fetch(_left(deadline) + command.timeout_s)

    def _agree_to_write(
        self, command: WeightCommand, deadline: float, failure: Exception | None, stamps: Mapping[str, str]
    ) -> None:
        manifest = self._planner.digest if failure is None else ""
        mine = _Opened(_text(failure), _names(failure), manifest, self._planner.is_checked, stamps)
        all_opened = self._ranks.gather(mine, _patience(command, deadline))
        failed = [(rank, opened) for rank, opened in enumerate(all_opened) if opened.error]
        if failed:
            text = "; ".join(f"rank {rank}: {opened.error}" for rank, opened in failed)
            raise FetchError(text, [name for _, opened in failed for name in opened.names])
        # What follows is refused by all ranks or by none: one alone would leave the others in the middle of a load.
        if len({opened.manifest for opened in all_opened}) > 1:
            raise FetchError(f"the ranks found different tensors under version {_version(command)}")
        if changed := _differing([opened.stamps for opened in all_opened]):
            raise FetchError(f"written to while the ranks opened it: {', '.join(changed)}")
        if not all(opened.is_checked for opened in all_opened):
            of_all = self._ranks.gather(self._planner.pieces, _patience(command, deadline))
            self._planner.check([piece for of_rank in of_all for piece in of_rank])

    def _fill(self, load: Load, command: WeightCommand, deadline: float) -> None:
        def go_on() -> None:
            if time.monotonic() > deadline:
                raise FetchError(f"the load took longer than {command.limit_s:.0f} s")

        failure: Exception | None = None
        try:
            load.run(go_on)
        except Exception as error:
            _log.warning("weights: the load failed: %s", error)
            failure = error
        began = time.perf_counter()
        try:
            results = self._ranks.gather(
                _Loaded(_text(failure), _names(failure), load.wrote), _patience(command, deadline)
            )
        except AgreementLost as lost:
            self._report.torn = str(lost)
            raise
        load.numbers.agree_s = time.perf_counter() - began
        failed = [(rank, loaded) for rank, loaded in enumerate(results) if loaded.error]
        if failed:
            text = "; ".join(f"rank {rank}: {loaded.error}" for rank, loaded in failed)
            if any(loaded.wrote for loaded in results):
                self._report.torn = f"a load of {_version(command)} failed after parameters were written: {text}"
            raise FetchError(text, [name for _, loaded in failed for name in loaded.names])

    # The rest

    def _start_prefetch(self, command: WeightCommand) -> None:
        _version(command)
        self._check_mode("cpu_prefetch")
        # Before anything that may fail on one rank alone: ranks stop together.
        if self._peers.serves_copy:
            self._peers.stop()
        self._prefetching.give_up()
        self._await_reads(0)
        if self._prefetching.is_misfit:
            self._drop_transports()
            self._prefetching.drop_copy()
        self._prefetching.start(command, self._transport(command.source))

    def _serve(self) -> None:
        if self._report.torn or self._report.version is None:
            raise CommandRefused("only an engine that has loaded a version can serve it")
        copy = self._prefetching.copy_of(self._report.version)
        self._peers.serve(self._report.version, self._planner.manifest, self._model, self._planner.plan, copy)

    def _get_ready(self, source: SourceInfo) -> None:
        try:
            self._transport(source).get_ready(source)
        except FetchError as error:
            # What is missing now may be there at the first load, which says so if it is not.
            _log.warning("weights: not ready for %s yet: %s", source.get("transport"), error)

    def _transport(self, source: SourceInfo) -> Transport:
        name = source.get("transport")
        if name not in self._transports:
            self._transports[name] = make_transport(
                name,
                settings=self._settings,
                rank=self._ranks.rank,
                ranks=self._ranks.size,
                name_of_rank=self._name,
            )
        return self._transports[name]

    def _await_reads(self, wait_s: float) -> None:
        """Raises StillReading where a read that was given up could write over what comes next."""
        busy = [str(name) for name, transport in self._transports.items() if not transport.is_idle(wait_s)]
        if busy:
            raise StillReading(f"a read by {busy[0]} that was given up has not come back: try again later, or restart")

    def _drop_transports(self) -> None:
        for name in [name for name, transport in self._transports.items() if transport.is_idle(0)]:
            self._transports.pop(name).close()

    def _check_mode(self, mode: LoadMode | str) -> None:
        if mode not in ("gpu_fetch", "cpu_prefetch"):
            raise ValueError(f"mode is {mode!r}; there are gpu_fetch and cpu_prefetch")
        if mode == "gpu_fetch" and self._quantized:
            raise ValueError(
                "gpu_fetch puts what the trainer sends straight into the parameters, and this model's are quantised"
                f" ({', '.join(self._quantized[:3])}, ...): use cpu_prefetch"
            )


def rank_of_engine(model: nn.Module, vllm_config: VllmConfig) -> RankWeights:
    """That of this worker process. Raises ValueError where weights cannot be replaced in place."""
    if vllm_config.lora_config is not None:
        raise ValueError(
            "an engine with adapters (enable_lora) cannot take weights in place: they would be of old weights"
        )
    ranks = engine_ranks(vllm_config.parallel_config.world_size)
    return RankWeights(model, vllm_config.model_config.dtype, ranks, read_settings(os.environ))


def _version(command: WeightCommand) -> str:
    version = command.source.get("version")
    if not isinstance(version, str) or not version:
        raise CommandRefused("the source names no version")
    return version


def _start_device_peak() -> int | None:
    """Bytes that are in use on the GPU; its peak is counted from now on. None where there is none."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    return _device_peak()


def _device_peak() -> int:
    """Since the last reset. Read from the nested figures: torch takes as long to flatten them as a GPU to copy a GB."""
    figures = torch.cuda.memory_stats_as_nested_dict()
    return int(figures["allocated_bytes"]["all"]["peak"])


def _patience(command: WeightCommand, deadline: float) -> float:
    """How long a rank that keeps its limits can still be under way."""
    return _left(deadline) + command.timeout_s + AGREE_MARGIN_S


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _text(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return str(failure) or type(failure).__name__


def _names(failure: Exception | None) -> tuple[str, ...]:
    return failure.tensors if isinstance(failure, FetchError) else ()


def _differing(maps: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys whose values are not the same in all."""
    return sorted(key for key in set().union(*maps) if len({each.get(key) for each in maps}) > 1)


def _figures(numbers: LoadNumbers) -> dict[str, Any]:
    """With the rates that the counts give."""
    figures = asdict(numbers)
    for group in (*figures["groups"], figures):
        group.setdefault("bytes", numbers.bytes)
        group["gb_per_s"] = group["bytes"] / group["seconds"] / 1e9 if group["seconds"] else 0.0
    for part in ("wait_s", "transfer_s", "copy_s", "process_s"):
        figures[part] = numbers.total(part)
    return figures
