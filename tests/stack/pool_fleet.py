"""Engines that share a real pool, driven as the control plane and the router drive them: the tests of epochs use it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from connectors.abilities import ask
from connectors.chain import ChainParts, transfer_config
from connectors.engine_client import EXTERNAL_HITS
from connectors.engine_env import common_environment, store_environment
from connectors.mooncake import StoreSettings, client_config
from connectors.nixl import NixlSettings
from connectors.pool_client import PoolClient
from connectors.types import Role
from connectors.vllm_plugin.pool_keys import epoch_prefix, epoch_salt
from tests.benchmarks.processes import free_port_range, free_ports
from tests.stack.weights.engine_process import EngineProcess, start_engine, wait_ready
from tests.stack.weights.volume import HOST, RunningVolume, running_volume

JOB = "job-1.a"
"""A key prefix, with a character that regular expressions read as any other."""
BLOCK = 32
SETTLE_S = 30
STORE_PORTS = 24
MODEL_LENGTH = 4096
AT_ONCE = 2
"""Requests that an engine computes at once; others wait."""
LEASE_S = 60.0
HANDOFF_LEASE_S = 20
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass
class Member:
    """One engine of the fleet."""

    engine: EngineProcess

    def hits(self) -> int:
        """Prompt tokens that have come from the pool so far."""
        return int(self.engine.client.counter(EXTERNAL_HITS))

    def gauge(self, name: str) -> float:
        text = self.engine.call("GET", "/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def request(self, prompt: Sequence[int], salt: str = "s", epoch: int | None = None, **more: Any) -> httpx.Response:
        """As the router sends it; `epoch`: the one that its salt names, where that is not the engine's."""
        named = self.engine.epoch if epoch is None else epoch
        return self.engine.complete([prompt], cache_salt=epoch_salt(named, salt), **more)

    def hits_of(self, prompt: Sequence[int], **more: Any) -> int:
        """Tokens that this request takes from the pool. What the engine itself has cached is forgotten first."""
        self.forget()
        before = self.hits()
        assert self.request(prompt, **{"max_tokens": 1, **more}).status_code == 200
        return self.hits() - before

    def forget(self) -> None:
        eventually(lambda: self.engine.client.reset_local_cache() is True)

    def to_epoch(self, epoch: int) -> None:
        self.engine.client.confirm_epoch(self.engine.instance, epoch, self.engine.next_order())
        self.engine.epoch = epoch

    def withdraw_epoch(self) -> None:
        order = self.engine.next_order()
        body = {"instance": self.engine.instance, "epoch": None}
        reply = self.engine.call(
            "POST", "/fence", {**body, "update": order.update, "attempt": order.attempt, "step": order.step}
        )
        assert reply.status_code == 200, reply.text

    def pause(self, mode: str) -> None:
        assert self.engine.call("POST", f"/pause?mode={mode}&clear_cache=false").is_success

    def resume(self) -> None:
        self.engine.resume()


@dataclass
class Fleet:
    """A prefill and a decode engine with the composed chain, on one pool."""

    prefill: Member
    decode: Member
    pool: PoolClient
    volume: RunningVolume
    threads: ThreadPoolExecutor

    @property
    def members(self) -> tuple[Member, Member]:
        return self.prefill, self.decode

    def keys(self, epoch: int, cache_prefix: str = JOB) -> int:
        return self.pool.count_keys(epoch_prefix(cache_prefix, epoch), SETTLE_S)

    def all_keys(self) -> int:
        return self.pool.count_keys("", SETTLE_S)

    def next_epoch(self) -> int:
        """As after a barrier: nothing runs while the engines move. Returns the number."""
        epoch = max(member.engine.epoch for member in self.members) + 1
        for member in self.members:
            member.pause("abort")
            member.to_epoch(epoch)
            member.resume()
            member.forget()
        return epoch

    def in_background(self, call: Callable[..., Any], *given: Any, **named: Any) -> Future[Any]:
        return self.threads.submit(call, *given, **named)

    @contextmanager
    def stopped_storage(self) -> Iterator[None]:
        """The storage client answers nothing in here; the master does."""
        os.kill(self.volume.client.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.volume.client.pid, signal.SIGCONT)


@contextmanager
def running_fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    """Both engines in epoch 1."""
    with ExitStack() as stack:
        volume = stack.enter_context(running_volume(folder, capacity_bytes=256 << 20, lease_s=LEASE_S))
        members = [start_member(model, folder, volume, role, str(core)) for core, role in enumerate(ROLES)]
        for member in members:
            stack.callback(member.engine.stop)
        for member in members:
            wait_ready(member.engine)
            member.to_epoch(1)
        threads = stack.enter_context(ThreadPoolExecutor(max_workers=2 * AT_ONCE))
        yield Fleet(members[0], members[1], pool_of(volume), volume, threads)


def pool_of(volume: RunningVolume) -> PoolClient:
    return PoolClient(python=sys.executable, master_address=volume.volume.master, metrics_url=volume.metrics_url)


def start_member(model: Path, folder: Path, volume: RunningVolume, role: Role, cores: str, *, ranks: int = 1) -> Member:
    """Begin to start an engine with the chain that is composed for its role."""
    own = folder / role
    own.mkdir()
    config = own / "mooncake.json"
    text = client_config(
        master_address=volume.volume.master,
        protocol="tcp",
        device_names=(),
        local_buffer_bytes=32 << 20,
        disk_tier=False,
    )
    config.write_text(text, encoding="ascii")
    parts = ChainParts(
        handoff=None
        if role == "colocated"
        else NixlSettings(lease_s=HANDOFF_LEASE_S, num_threads=1, cross_layers_blocks=False),
        store=StoreSettings(cache_prefix=JOB, save_decode_cache=True, cross_layers_blocks=False, by_epoch=True),
        native=None,
    )
    port, side_channel = free_ports(2)
    arguments = {
        "--kv-transfer-config": json.dumps(transfer_config(role, parts, ask(sys.executable))),
        "--max-model-len": MODEL_LENGTH,
        "--max-num-seqs": AT_ONCE,
    }
    variables = {
        **common_environment(
            advertised_host=HOST, rpc_dir=str(own), side_channel_port=side_channel, token_file=str(own / "token")
        ),
        **store_environment(
            config_path=str(config),
            advertised_host=HOST,
            protocol="tcp",
            ports=(free_port_range(STORE_PORTS), STORE_PORTS),
        ),
    }
    engine = start_engine(model, own, port, ranks=ranks, cores=cores, arguments=arguments, variables=variables)
    return Member(engine)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.1)
