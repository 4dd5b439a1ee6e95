"""A Mooncake volume for weights: its own master and a storage client, started as a job would start them."""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from connectors.store_argv import ClientSettings, MasterSettings, client_argv, client_environment, master_argv
from connectors.weights.store_client import Volume
from tests.benchmarks.processes import Process, free_port_range, free_ports, started

HOST = "127.0.0.1"
UP_S = 60
TRANSFER_PORTS = 24


@dataclass(frozen=True)
class RunningVolume:
    volume: Volume
    metrics_url: str
    master: Process
    client: Process


@contextmanager
def running_volume(folder: Path, *, capacity_bytes: int, lease_s: float) -> Iterator[RunningVolume]:
    """Up when a first object could be put."""
    rpc_port, metrics_port, client_port = free_ports(3)
    settings = MasterSettings(
        program=program("mooncake_master"),
        bind_host=HOST,
        rpc_port=rpc_port,
        metrics_port=metrics_port,
        lease_ttl_s=lease_s,
        disk_tier=False,
        extra_flags={},
    )
    name = f"{folder.name}-{rpc_port}"
    with started(f"{name}-master", master_argv(settings), folder=folder) as master:
        _wait_listening(master, rpc_port)
        client = ClientSettings(
            program=program("mooncake_client"),
            host=HOST,
            port=client_port,
            transfer_ports=(free_port_range(TRANSFER_PORTS), TRANSFER_PORTS),
            master_address=f"{HOST}:{rpc_port}",
            protocol="tcp",
            device_names=(),
            segment_bytes=capacity_bytes,
            disk_path=None,
            disk_bytes=None,
        )
        environment = client_environment(client)
        with started(f"{name}-client", client_argv(client), folder=folder, environment=environment) as storage:
            _wait_listening(storage, client_port)
            volume = Volume(master=client.master_address, protocol="tcp", host=HOST, devices=(), lend_bytes=0)
            yield RunningVolume(volume, f"http://{HOST}:{metrics_port}/metrics", master, storage)


def program(name: str) -> str:
    """The wheel's own copy, which needs no console script."""
    (folder,) = importlib.import_module("mooncake").__path__
    return str(Path(folder) / name)


def _wait_listening(process: Process, port: int) -> None:
    deadline = time.monotonic() + UP_S
    while True:
        process.check_alive()
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        assert time.monotonic() < deadline, process.log_end()
        time.sleep(0.05)
