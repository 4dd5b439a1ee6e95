"""Plain data as hashable tuples and back, so that what a real core knows can be part of a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from tests.model.fleet import SAME, Swap, renamed

Frozen = Any
"""A leaf, or a tuple of a type and its parts."""


def freeze(value: Any) -> Frozen:
    if is_dataclass(value):
        return (type(value), *(freeze(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, Mapping):
        return (dict, *sorted((freeze(key), freeze(each)) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return (set, *sorted(map(freeze, value)))
    if isinstance(value, tuple | list):
        return (tuple, *map(freeze, value))
    return value


@cache
def read(frozen: Frozen) -> Any:
    """What is frozen, to look at: everyone gets the same object."""
    return thaw(frozen)


def thaw(frozen: Frozen) -> Any:
    if not isinstance(frozen, tuple):
        return frozen
    kind, *parts = frozen
    if kind is dict:
        return {thaw(key): thaw(value) for key, value in parts}
    if kind in (set, tuple):
        return kind(map(thaw, parts))
    return kind(**{field.name: thaw(part) for field, part in zip(fields(kind), parts, strict=True)})


def rename(frozen: Frozen, swap: Swap) -> Frozen:
    """The same with two equal engines exchanged."""
    if isinstance(frozen, str):
        return renamed(frozen, swap)
    return _renamed_parts(frozen, swap) if isinstance(frozen, tuple) and swap != SAME else frozen


@cache
def _renamed_parts(frozen: Frozen, swap: Swap) -> Frozen:
    if not frozen or not isinstance(frozen[0], type):
        return tuple(rename(each, swap) for each in frozen)
    kind, *parts = frozen
    moved = [rename(each, swap) for each in parts]
    is_unordered = kind in (dict, set) or (kind is tuple and all(isinstance(each, str) for each in moved))
    return (kind, *(sorted(moved) if is_unordered else moved))
