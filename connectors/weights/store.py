"""The `store` transport: weights from a Mooncake volume, by reads of ranges into registered memory.

`connectors/publisher/store.py` puts them there. `store_layout.py` says under which names, `store_client.py` talks to
the volume, `filling.py` puts bytes where they belong.

While a version is read its objects have leases, which each group renews: the publisher's removal of old versions passes
them by. Should one be removed all the same (by force, or after a reader has slept longer than its lease), the look at
its names after each read tells: Mooncake itself may then return foreign bytes without an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TypeVar, get_args

from connectors.mooncake import Protocol
from connectors.weights.bounded import BoundedCalls, Deadline
from connectors.weights.filling import Filling, Part, Read, slices
from connectors.weights.source import FetchError, Moved, Plan, SourceInfo, Target, source_field
from connectors.weights.store_client import RangeRead, StoreClient, StoreError, Volume, memory_of
from connectors.weights.store_layout import Manifest, StoredPiece
from connectors.weights.tensors import ITEM_BYTES, Piece, TensorMeta, relative

RANGE_COST_BYTES = 128 * 1024
"""Measured on loopback tcp: a range costs some 0.15 ms, in which so many bytes come."""
STAGING_PART = 1 / 64
MOST_STAGING_BYTES = 128 << 20
LEAST_STAGING_BYTES = 4 << 20
"""Each half of the staging buffer is so large a part of what a rank needs, within these bounds. Where everything goes
through it, into a GPU, a load with halves of 32 MB takes a seventh longer."""
CONNECT_S = 30.0
"""When the engine starts."""
RENEW_S = 2.0
"""Well below the shortest lease that makes sense; Mooncake's own default is 10 s."""

T = TypeVar("T")


class StoreTransport:
    """Keeps its connection to the volume, and memory that stays where it is registered."""

    def __init__(self, *, host: str | None = None, devices: tuple[str, ...] = ()) -> None:
        """`host`: the address by which peers reach this machine; None: that of the route to the master."""
        self._host = host
        self._devices = devices
        self._calls = BoundedCalls()
        self._client: tuple[Volume, StoreClient] | None = None
        self._filling: Filling[StoredPiece] | None = None

    def get_ready(self, source: SourceInfo) -> None:
        if "master" in source:
            self._connect(source, CONNECT_S)

    def open(self, source: SourceInfo, plan: Plan, *, timeout_s: float) -> StoreFetch:
        key = source_field(source, "manifest", str)
        deadline = Deadline(timeout_s, what=f"store: asking for version {source['version']}")
        client = self._connect(source, deadline.left_s())
        manifest = self.bounded(
            lambda: Manifest.decode(client.text(key)),
            what=f"the manifest of version {source['version']}",
            timeout_s=deadline.left_s(),
        )
        groups = plan(manifest.metas)
        fetch = StoreFetch(self, client, manifest, groups, self._filling_for(groups, manifest), timeout_s)
        self.bounded(fetch.check_there, what=f"version {source['version']}", timeout_s=timeout_s)
        return fetch

    def close(self) -> None:
        if self._client is not None:
            self._client[1].close()
        self._client = None

    def is_idle(self, wait_s: float) -> bool:
        return self._calls.is_idle(wait_s)

    def bounded(self, call: Callable[[], T], *, what: str, timeout_s: float) -> T:
        """Calls into Mooncake don't end when a storage client hangs."""
        try:
            return self._calls.run(call, what=f"store: {what}", timeout_s=timeout_s)
        except (StoreError, ValueError, OSError) as error:
            raise FetchError(f"store: {what}: {error}") from error

    def _filling_for(self, groups: Sequence[Sequence[Piece]], manifest: Manifest) -> Filling[StoredPiece]:
        """The same for all loads: an engine's weights don't change in size."""
        if self._filling is None:
            needed = sum(piece.count * ITEM_BYTES[manifest.metas[piece.tensor].dtype] for g in groups for piece in g)
            half = min(max(int(needed * STAGING_PART), LEAST_STAGING_BYTES), MOST_STAGING_BYTES)
            self._filling = Filling(range_cost_bytes=RANGE_COST_BYTES, staging_bytes=half)
        return self._filling

    def _connect(self, source: SourceInfo, timeout_s: float) -> StoreClient:
        volume = Volume(
            master=source_field(source, "master", str),
            protocol=_protocol(source),
            host=self._host,
            devices=self._devices,
            lend_bytes=0,
        )
        return self.bounded(lambda: self._connected(volume), what="connecting", timeout_s=timeout_s)

    def _connected(self, volume: Volume) -> StoreClient:
        if self._client is not None and self._client[0] != volume:
            self.close()
        if self._client is None:
            self._client = (volume, StoreClient(volume))
        return self._client[1]


def _protocol(source: SourceInfo) -> Protocol:
    found = source_field(source, "protocol", str)
    for known in get_args(Protocol):
        if found == known:
            protocol: Protocol = known
            return protocol
    raise FetchError(f"the source's protocol is {found!r}; there are {', '.join(get_args(Protocol))}")


class StoreFetch:
    """One version, open for one load."""

    def __init__(
        self,
        transport: StoreTransport,
        client: StoreClient,
        manifest: Manifest,
        groups: Sequence[Sequence[Piece]],
        filling: Filling[StoredPiece],
        timeout_s: float,
    ) -> None:
        self.stamps: Mapping[str, str] = {}
        self._transport = transport
        self._client = client
        self._manifest = manifest
        self._timeout_s = timeout_s
        self._needed = {stored.key for group in groups for piece in group for stored, _ in manifest.holding(piece)}
        self._renewed_at = -math.inf
        self._filling = filling
        self._staying = {memory_of(filling.staging)}

    @property
    def manifest(self) -> Mapping[str, TensorMeta]:
        return self._manifest.metas

    def start(self, group: int, targets: Sequence[Target]) -> None:
        """Mooncake reads with all its threads already."""

    def fetch(self, group: int, targets: Sequence[Target]) -> Moved:
        began = time.perf_counter()
        self._transport.bounded(lambda: self._fill(targets), what=f"group {group}", timeout_s=self._timeout_s)
        return Moved(bytes=sum(target.into.nbytes for target in targets), transfer_s=time.perf_counter() - began)

    def close(self) -> None:
        """Leases end by themselves."""
        if self._transport.is_idle(0):
            self._client.forget_all_but(self._staying)

    def check_there(self) -> None:
        """Renew the leases of all that is needed. FetchError if something is gone."""
        self._check(self._needed)
        self._renewed_at = time.monotonic()

    def _fill(self, targets: Sequence[Target]) -> None:
        parts = [part for target in targets for part in self._parts(target)]
        in_host = [target for target in targets if target.into.is_cpu]
        staying = [self._filling.staging, *(target.into for target in in_host if target.stays)]
        self._staying.update(map(memory_of, staying))
        self._client.register(staying)
        passing = self._client.register(target.into for target in in_host)
        try:
            self._filling.fill(parts, self._read)
        finally:
            self._client.forget(passing)
        if time.monotonic() - self._renewed_at > RENEW_S:
            self.check_there()
        else:
            self._check({part.stored.key for part in parts})

    def _parts(self, target: Target) -> Iterator[Part[StoredPiece]]:
        for stored, common in self._manifest.holding(target.piece):
            into = target.into[slices(relative(common, target.piece.box))]
            yield Part(stored, stored.shape, relative(common, stored.box), into)

    def _read(self, reads: Sequence[Read[StoredPiece]]) -> None:
        self._client.read([RangeRead(read.stored.key, read.start, read.into) for read in reads])

    def _check(self, keys: Set[str]) -> None:
        gone = self._client.missing(sorted(keys))
        if gone:
            version = self._manifest.version
            raise FetchError(f"version {version} was removed from the volume: {len(gone)} objects, {gone[0]} for one")
