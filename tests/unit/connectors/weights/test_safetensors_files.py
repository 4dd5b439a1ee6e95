"""Headers of checkpoints: what is planned is found again at the same place."""

from __future__ import annotations

from pathlib import Path

from connectors.weights.safetensors_files import INDEX, SINGLE, index_text, places_in, plan_files
from connectors.weights.tensors import ITEM_BYTES, TensorMeta

METAS = {
    "bytes": TensorMeta("uint8", (3,)),
    "half": TensorMeta("bfloat16", (5, 7)),
    "scalar": TensorMeta("float64", ()),
    "empty": TensorMeta("float32", (0, 4)),
}


def write(folder: Path, max_file_bytes: int) -> list[str]:
    plans = plan_files(METAS, max_file_bytes)
    for plan in plans:
        (folder / plan.name).write_bytes(plan.header.ljust(plan.size, b"\0"))
    if len(plans) > 1:
        (folder / INDEX).write_text(index_text(plans))
    assert places_in(folder) == {name: place for plan in plans for name, place in plan.places.items()}
    return [plan.name for plan in plans]


def test_one_file(tmp_path: Path) -> None:
    assert write(tmp_path, max_file_bytes=1000) == [SINGLE]
    assert {name: place.meta for name, place in places_in(tmp_path).items()} == METAS
    assert all(place.start % ITEM_BYTES[place.meta.dtype] == 0 for place in places_in(tmp_path).values())


def test_several_files_under_an_index(tmp_path: Path) -> None:
    assert write(tmp_path, max_file_bytes=70) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
