"""The transports by name, made when a source first names them."""

from __future__ import annotations

from collections.abc import Callable

from connectors.vllm_plugin.weights.settings import WeightSettings
from connectors.weights.source import FetchError, Transport


def make_transport(name: object, *, settings: WeightSettings, rank: int, ranks: int, name_of_rank: str) -> Transport:
    """`name_of_rank`: one of its own for this life of this rank. Raises FetchError where there is no such transport, or
    its library is not installed."""
    makers: dict[object, Callable[[], Transport]] = {
        "path": _path,
        "store": lambda: _store(settings.host),
        "nixl": lambda: _nixl(rank, ranks, name_of_rank),
    }
    make = makers.get(name)
    if make is None:
        raise FetchError(f"the source's transport is {name!r}; there are {', '.join(map(str, makers))}")
    try:
        return make()
    except ImportError as error:
        raise FetchError(f"the transport {name} is not installed here: {error}") from error


# Libraries are imported where they are first needed: an engine has those of the transports that it uses.


def _path() -> Transport:
    from connectors.weights.path import PathTransport

    return PathTransport()


def _store(host: str) -> Transport:
    from connectors.weights.store import StoreTransport

    return StoreTransport(host=host)


def _nixl(rank: int, ranks: int, name_of_rank: str) -> Transport:
    from connectors.weights.nixl.transport import NixlTransport

    return NixlTransport(name=name_of_rank, rank=rank, world_size=ranks)
