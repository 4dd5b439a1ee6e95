"""A trainer of one rank for tests of engines: serves one checkpoint by NIXL until it is killed.

It says ("published", source). It takes ("await_readers", ranks) and says ("read", None) once so many read; it takes
("wait", readers, timeout_s) and says ("done", lost readers) once it may go on.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

from connectors.publisher.nixl import NixlPublisher
from tests.stack.weights.checkpoints import tensors_of
from tests.stack.weights.programs import Program

LEASE_S = 5.0
LOOK_EVERY_S = 0.001


def run(pipe: Connection, checkpoint: Path, version: str = "v1") -> None:
    publisher = NixlPublisher(host="127.0.0.1", lease_s=LEASE_S)
    publication = publisher.publish(tensors_of(checkpoint), version)
    pipe.send(("published", dict(publication.source)))
    while True:
        word, *values = pipe.recv()
        if word == "await_readers":
            while publisher.attended < values[0]:
                time.sleep(LOOK_EVERY_S)
            pipe.send(("read", None))
        else:
            readers, timeout_s = values
            publication.wait_done(timeout_s, readers)
            pipe.send(("done", publication.readers and len(publication.readers.lost)))


def is_read_by(trainer: Program, ranks: int) -> bool:
    """True once so many ranks of engines read, or are about to."""
    trainer.tell("await_readers", ranks)
    trainer.hear("read")
    return True
