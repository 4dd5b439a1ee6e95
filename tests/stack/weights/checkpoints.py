"""Checkpoints of tiny models, good ones and ones with a fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_model import Architecture, make_tiny_model
from tests.stack.weights.engine_process import MODELS

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def checkpoints(architecture: Architecture, count: int) -> list[Path]:
    """The same model with different weights."""
    return [make_tiny_model(MODELS / f"weights-{architecture}-{seed}", seed, architecture) for seed in range(count)]


def tensors_of(checkpoint: Path) -> Tensors:
    tensors: Tensors = load_file(checkpoint / WEIGHTS)
    return tensors


def path_source(checkpoint: Path, version: str) -> dict[str, Any]:
    return {"transport": "path", "version": version, "path": str(checkpoint)}


def changed(checkpoint: Path, folder: Path, change: Callable[[Tensors], None]) -> dict[str, Any]:
    """The source of a copy with a fault in it."""
    folder.mkdir()
    tensors = tensors_of(checkpoint)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    shutil.copy(checkpoint / "config.json", folder)
    return path_source(folder, folder.name)
