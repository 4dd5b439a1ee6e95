"""A trainer of one rank for tests of engines: serves one checkpoint by NIXL until it is killed.

It says ("published", source), takes ("wait", readers, timeout_s) and says ("done", lost readers) once it may go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from connectors.publisher.nixl import NixlPublisher
from tests.stack.weights.checkpoints import tensors_of

LEASE_S = 5.0
CHANNELS_PER_RANK = 2
"""Connections of a reader to its only producer: for its lease, and while it reads."""


def run(pipe: Connection, checkpoint: Path) -> None:
    publication = NixlPublisher(host="127.0.0.1", lease_s=LEASE_S).publish(tensors_of(checkpoint), "v1")
    pipe.send(("published", dict(publication.source)))
    _, readers, timeout_s = pipe.recv()
    publication.wait_done(timeout_s, readers)
    pipe.send(("done", publication.readers and len(publication.readers.lost)))


def is_read_by(ranks: int, source: Mapping[str, Any]) -> bool:
    """Whether so many ranks of engines are about to read or read, by the kernel's table of connections."""
    port, established = f":{source['port']:04X}", "01"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row for row in rows if row[1].endswith(port) and row[3] == established]
    return len(found) >= CHANNELS_PER_RANK * ranks
