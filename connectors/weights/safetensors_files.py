"""Where the tensors of a safetensors checkpoint stand, in one file or in several under an index: headers alone.

`path.py` reads the tensors, `connectors/publisher/path.py` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.weights.source import FetchError
from connectors.weights.tensors import ITEM_BYTES, TensorMeta

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""The format's names of dtypes, and ours."""
CODES = {name: code for code, name in DTYPES.items()}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a longer one is no header."""
METADATA = "__metadata__"
FORMAT = {"format": "pt"}
"""transformers refuses files that don't say which framework wrote them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor stands."""

    file: str
    start: int
    """Byte in the file."""
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be written."""

    name: str
    header: bytes
    places: Mapping[str, Place]
    size: int


def places_in(folder: Path) -> dict[str, Place]:
    """All tensors of a checkpoint. FetchError for one that is not whole, with the names of what is missing."""
    index = folder / INDEX
    if index.is_file():
        return _places_by_index(folder, index)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    raise FetchError(f"{folder}: neither {INDEX} nor {SINGLE}: not a checkpoint, or one that is still being written")


def _places_by_index(folder: Path, index: Path) -> dict[str, Place]:
    try:
        file_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise FetchError(f"{index}: no index of weights, or one that is still being written ({error!r})") from error
    places: dict[str, Place] = {}
    for name in sorted(set(file_of.values())):
        if Path(name).name != name:
            raise FetchError(f"{index}: names {name!r}, which is not a file beside it")
        if not (folder / name).is_file():
            raise FetchError(f"{folder}: {name} of the index is missing", _tensors_of(file_of, name))
        found = read_header(folder / name)
        places |= {tensor: found[tensor] for tensor in _tensors_of(file_of, name) if tensor in found}
    missing = sorted(file_of.keys() - places.keys())
    if missing:
        raise FetchError(f"{folder}: files lack tensors that the index places there: {', '.join(missing)}", missing)
    return places


def _tensors_of(file_of: Mapping[str, str], file: str) -> list[str]:
    return sorted(tensor for tensor, name in file_of.items() if name == file)


def read_header(path: Path) -> dict[str, Place]:
    """The tensors of one file, which has to be as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or not 0 < length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise FetchError(f"{path}: no whole header in {size} bytes: damaged, or still being written")
        text = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop(METADATA, None)
        places = {name: _place(path.name, LENGTH_BYTES + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{path}: not a safetensors header ({error!r})") from error
    end = max((place.start + place.meta.nbytes for place in places.values()), default=LENGTH_BYTES + length)
    if size != end:
        raise FetchError(f"{path}: {size} bytes where its header promises {end}: damaged, or still being written")
    return places


def _place(file: str, data_start: int, entry: Mapping[str, Any]) -> Place:
    meta = TensorMeta(DTYPES[entry["dtype"]], tuple(entry["shape"]))
    first, last = entry["data_offsets"]
    if last - first != meta.nbytes:
        raise ValueError(f"{last - first} bytes for {meta}")
    return Place(file, data_start + first, meta)


def plan_files(metas: Mapping[str, TensorMeta], max_file_bytes: int) -> list[FilePlan]:
    """Files that hold these tensors in their order, each of at most `max_file_bytes` unless one tensor is longer."""
    batches: list[dict[str, TensorMeta]] = [{}]
    used = 0
    for name, meta in metas.items():
        if batches[-1] and used + meta.nbytes > max_file_bytes:
            batches.append({})
            used = 0
        batches[-1][name] = meta
        used += meta.nbytes
    if len(batches) == 1:
        return [_plan_file(SINGLE, batches[0])]
    count = len(batches)
    return [_plan_file(f"model-{i:05d}-of-{count:05d}.safetensors", batch) for i, batch in enumerate(batches, start=1)]


def _plan_file(name: str, metas: Mapping[str, TensorMeta]) -> FilePlan:
    entries: dict[str, Any] = {METADATA: FORMAT}
    first = 0
    # No holes are allowed between tensors; with the longest items first each is aligned all the same.
    for tensor, meta in sorted(metas.items(), key=lambda each: -ITEM_BYTES[each[1].dtype]):
        entries[tensor] = {
            "dtype": CODES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [first, first + meta.nbytes],
        }
        first += meta.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    places = {
        tensor: Place(name, len(header) + entries[tensor]["data_offsets"][0], meta) for tensor, meta in metas.items()
    }
    return FilePlan(name, header, places, len(header) + first)


def index_text(files: Iterable[FilePlan]) -> str:
    """The index of several files."""
    weight_map = {tensor: file.name for file in files for tensor in file.places}
    total = sum(place.meta.nbytes for file in files for place in file.places.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
