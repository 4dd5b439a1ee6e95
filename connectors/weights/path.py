"""The `path` transport: weights from a directory of safetensors, only the bytes that this rank needs.

`safetensors_files.py` finds them, `filling.py` puts them where they belong. A version is written once, under a name
of its own (`connectors/publisher/path.py` renames it there when it is whole); that it was not changed meanwhile is
checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from connectors.weights.bounded import BoundedCalls
from connectors.weights.filling import Filling, Part, Read
from connectors.weights.safetensors_files import Place, places_in
from connectors.weights.source import FetchError, Moved, Plan, SourceInfo, Target, source_field
from connectors.weights.tensors import TensorMeta

RANGE_COST_BYTES = 8 * 1024
"""What a call costs more than bytes that a longer call reads along: so much memory is copied in its time."""
CHUNK_BYTES = 2 << 20
"""What one thread reads at a time."""
MAX_THREADS = 8
STAGING_BYTES = 16 << 20


class PathTransport:
    """Reads with several threads: one does not fill a network file system or a fast disk."""

    def __init__(self) -> None:
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-path")
        self._calls = BoundedCalls()
        self._filling: Filling[Place] = Filling(range_cost_bytes=RANGE_COST_BYTES, staging_bytes=STAGING_BYTES)

    def get_ready(self, source: SourceInfo) -> None:
        """There is nothing to connect to."""

    def open(self, source: SourceInfo, plan: Plan, *, timeout_s: float) -> PathFetch:
        files = _Files(Path(source_field(source, "path", str)))
        try:
            self._calls.run(files.open, what=f"opening {files.folder}", timeout_s=timeout_s)
            manifest = {name: place.meta for name, place in files.places.items()}
            plan(manifest)
            return PathFetch(self, files, manifest, timeout_s)
        except BaseException:
            self.close_files(files)
            raise

    def fill(self, files: _Files, parts: Sequence[Part[Place]], *, what: str, timeout_s: float) -> None:
        def read(reads: Sequence[Read[Place]]) -> None:
            chunks = [self._pool.submit(files.read_chunk, chunk) for chunk in _chunks(reads)]
            try:
                for chunk in chunks:
                    chunk.result()
            finally:
                # After a failure too nothing may still write when this returns.
                for chunk in chunks:
                    chunk.cancel()
                wait(chunks)

        def fill() -> None:
            try:
                self._filling.fill(parts, read)
                files.check_unchanged()
            except OSError as error:
                raise FetchError(f"{files.folder}: {error}") from error

        self._calls.run(fill, what=what, timeout_s=timeout_s)

    def close_files(self, files: _Files) -> None:
        """A read that was given up still has them: another file under their numbers would be read for them."""
        self._calls.when_idle(files.close)

    def is_idle(self, wait_s: float) -> bool:
        return self._calls.is_idle(wait_s)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def _chunks(reads: Sequence[Read[Place]]) -> Iterator[_Chunk]:
    for read in reads:
        into = read.into.numpy().data
        for done in range(0, len(into), CHUNK_BYTES):
            yield _Chunk(read.stored.file, read.stored.start + read.start + done, into[done : done + CHUNK_BYTES])


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: str
    start: int
    into: memoryview


class _Files:
    """The open files of a checkpoint: what is open stays readable when its name goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: Mapping[str, Place] = {}
        self._stack = ExitStack()
        self._descriptors: dict[str, int] = {}
        self.stamps: Mapping[str, str] = {}

    def open(self) -> None:
        try:
            self.places = places_in(self.folder)
            for name in {place.file for place in self.places.values()}:
                descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, descriptor)
                self._descriptors[name] = descriptor
            self.stamps = self._stamps()
        except OSError as error:
            raise FetchError(f"{self.folder}: {error}") from error

    def read_chunk(self, chunk: _Chunk) -> None:
        start, into = chunk.start, chunk.into
        while into:
            count = os.preadv(self._descriptors[chunk.file], [into], start)
            if not count:
                raise FetchError(f"{self.folder / chunk.file}: ends at byte {start}: cut while it was read")
            into, start = into[count:], start + count

    def check_unchanged(self) -> None:
        changed = sorted(name for name, stamp in self._stamps().items() if stamp != self.stamps[name])
        if changed:
            raise FetchError(f"written to while it was read: {', '.join(changed)}")

    def close(self) -> None:
        self._stack.close()

    def _stamps(self) -> dict[str, str]:
        """Without numbers of the file system: nodes may have copies of their own."""
        stats = {str(self.folder / name): os.fstat(descriptor) for name, descriptor in self._descriptors.items()}
        return {name: f"{stat.st_size} bytes of {stat.st_mtime_ns}" for name, stat in stats.items()}


class PathFetch:
    """One checkpoint, open for one load."""

    def __init__(
        self, transport: PathTransport, files: _Files, manifest: Mapping[str, TensorMeta], timeout_s: float
    ) -> None:
        self.manifest = manifest
        self.stamps = files.stamps
        self._transport = transport
        self._files = files
        self._timeout_s = timeout_s

    def start(self, group: int, targets: Sequence[Target]) -> None:
        """Reading ahead would only take memory bandwidth from finishing the group before."""

    def fetch(self, group: int, targets: Sequence[Target]) -> Moved:
        places = self._files.places
        parts = [
            Part(places[t.piece.tensor], places[t.piece.tensor].meta.shape, t.piece.box, t.into)
            for t in targets
            if t.piece.count
        ]
        began = time.perf_counter()
        self._transport.fill(self._files, parts, what=f"{self._files.folder}: group {group}", timeout_s=self._timeout_s)
        return Moved(bytes=sum(part.into.nbytes for part in parts), transfer_s=time.perf_counter() - began)

    def close(self) -> None:
        self._transport.close_files(self._files)
