"""Publishes versions as directories of safetensors: ordinary checkpoints, which stock vLLM loads too.

No rank gathers a tensor: the files are laid out first, then each rank writes its rows where they belong, and the
directory gets its name when all of it is on disk. All ranks have to see the same file system.
`connectors/weights/path.py` reads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed, nn

from connectors.publisher.ranks import PublishError, Ranks, own_share
from connectors.weights.filling import byte_vector
from connectors.weights.holdings import Holding
from connectors.weights.safetensors_files import INDEX, FilePlan, Place, index_text, plan_files
from connectors.weights.source import SourceInfo
from connectors.weights.tensors import ITEM_BYTES, runs

MAX_FILE_BYTES = 4 << 30
COPIED = ("*.json", "*.txt", "*.jinja", "*.model")
"""Of the model's folder: configuration and tokenizer."""


@dataclass(frozen=True)
class PathPublication:
    """A version on disk. The trainer may overwrite its weights at once."""

    source: SourceInfo

    def wait_done(self, timeout_s: float, readers: int | None = None) -> None:
        """Nobody reads the trainer's memory."""


class PathPublisher:
    """Writes each version to `folder`/`version`; called on all ranks alike."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | None,
        keep: int | None,
        group: distributed.ProcessGroup | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """`model`: its configuration and tokenizer are copied into every version, so that an engine can start on one.
        `keep`: how many of its versions stay; older ones are removed when a new one is whole. None: all."""
        self._folder = folder
        self._model = model
        self._keep = keep
        self._ranks = Ranks(group)
        self._max_file_bytes = max_file_bytes
        self._published: list[Path] = []

    def publish(self, source: nn.Module | Mapping[str, torch.Tensor], version: str) -> PathPublication:
        """Returns on all ranks when the version is whole and on disk. PublishError on all when one fails."""
        metas, mine = own_share(self._ranks, source)
        version_folder = _VersionFolder(self._folder, version, plan_files(metas, self._max_file_bytes))
        self._ranks.first(version_folder.check)
        try:
            self._ranks.first(version_folder.prepare)
            self._ranks.each(lambda: version_folder.write(mine))
            self._ranks.first(lambda: version_folder.finish(self._model))
        except PublishError:
            # A full disk would stay full otherwise.
            self._ranks.first(version_folder.discard)
            raise
        if self._ranks.rank == 0:
            self._retire(version_folder.final)
        return PathPublication({"transport": "path", "version": version, "path": str(version_folder.final)})

    def close(self) -> None:
        """What is published stays."""

    def _retire(self, published: Path) -> None:
        """What an engine has open stays readable for it; only the name is gone."""
        if self._keep is None:
            return
        self._published.append(published)
        while len(self._published) > self._keep:
            shutil.rmtree(self._published.pop(0), ignore_errors=True)


class _VersionFolder:
    """One version on its way to its name."""

    def __init__(self, folder: Path, version: str, files: Sequence[FilePlan]) -> None:
        self._files = files
        self.final = folder.absolute() / version
        self._partial = folder.absolute() / f".{version}.partial"

    def check(self) -> None:
        """Whether the version may get this name."""
        if self.final.name.startswith(".") or self.final.parent != self._partial.parent:
            raise ValueError(f"version {self.final.name!r} is no name for a directory")
        if self.final.exists():
            raise FileExistsError(f"{self.final} is there already: a version is published once")

    def prepare(self) -> None:
        """Every file with its header, at its full length."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        for plan in self._files:
            with (self._partial / plan.name).open("wb") as file:
                file.write(plan.header)
                file.truncate(plan.size)

    def write(self, held: Sequence[Holding]) -> None:
        """Put these pieces where they belong."""
        places = {name: place for plan in self._files for name, place in plan.places.items()}
        with ExitStack() as stack:
            descriptors: dict[str, int] = {}
            for holding in held:
                place = places[holding.piece.tensor]
                if place.file not in descriptors:
                    descriptors[place.file] = os.open(self._partial / place.file, os.O_WRONLY | os.O_CLOEXEC)
                    stack.callback(os.close, descriptors[place.file])
                _write_piece(descriptors[place.file], place, holding)
            for descriptor in descriptors.values():
                os.fsync(descriptor)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def finish(self, model: Path | None) -> None:
        """The index and what else a checkpoint has, then the name."""
        if len(self._files) > 1:
            (self._partial / INDEX).write_text(index_text(self._files), encoding="utf-8")
        if model is not None:
            for file in (file for pattern in COPIED for file in model.glob(pattern) if file.name != INDEX):
                shutil.copy(file, self._partial)
        for file in self._partial.iterdir():
            _sync(file)
        _sync(self._partial)
        self._partial.rename(self.final)
        _sync(self.final.parent)


def _write_piece(descriptor: int, place: Place, holding: Holding) -> None:
    item = ITEM_BYTES[place.meta.dtype]
    values = byte_vector(holding.tensor.cpu().contiguous()).numpy().data
    for first, count in runs(holding.piece.box, place.meta.shape):
        rest, start = values[: count * item], place.start + first * item
        values = values[count * item :]
        while rest:
            written = os.pwrite(descriptor, rest, start)
            rest, start = rest[written:], start + written


def _sync(path: Path) -> None:
    """To disk: a file's bytes, a directory's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
