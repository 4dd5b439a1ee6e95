"""A reader: takes what one rank needs straight out of M producers' shards, with one-sided reads.

Before it `lines.py` (connections), `held_lease.py` and `session.py` (the reads), after it the load in
`vllm_plugin/weights/`. The protocol stands in `messages.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from connectors.weights.bounded import Deadline
from connectors.weights.nixl.client import Channel, leader_address
from connectors.weights.nixl.held_lease import HeldLease, Renewals
from connectors.weights.nixl.lines import Lines
from connectors.weights.nixl.messages import Layout, Open, Opened
from connectors.weights.nixl.reads import Reader
from connectors.weights.nixl.session import Prepared, Session
from connectors.weights.source import FetchError, Moved, Plan, SourceInfo, Target, source_field
from connectors.weights.tensors import TensorMeta


class NixlTransport:
    """One rank's, for as long as its engine lives."""

    def __init__(self, *, name: str, rank: int, world_size: int) -> None:
        """`name`: of this rank in this life of its engine; producers know it again when it comes back after a failure.

        `rank` and `world_size`: of its engine. Where several engines load, a control plane says in the source which of
        all generator ranks the engine's rank 0 is and how many there are: `numbered` in `source.py`."""
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._layout: Layout | None = None
        self._session: Session | None = None
        self._lines = Lines()
        self._renewals = Renewals()

    def get_ready(self, _source: SourceInfo) -> None:
        with self.session():
            pass

    def open(self, source: SourceInfo, plan: Plan, *, timeout_s: float) -> NixlFetch:
        reader = self._reader(source)
        # Before there is a lease: to start NIXL may take longer than one lasts.
        self.get_ready(source)
        version = source_field(source, "version", str)
        deadline = Deadline(timeout_s, what=f"asking for version {version}")
        leader = self._lines.to(leader_address(source), deadline)
        with ExitStack() as undo:
            opened = self._let_in(leader, version, deadline.left_s())
            lease = HeldLease(leader, opened.lease, lease_s=opened.lease_s, timeout_s=timeout_s)
            undo.callback(lease.let_go)
            self._renewals.hold(lease)
            layout = self._layout = opened.layout or self._layout
            assert layout is not None, "a leader leaves out only what its reader has named"
            groups = plan(layout.tensors)
            with self.session() as session:
                kept = session.prepared(layout, groups, reader)
                prepared = kept or session.prepare(layout, groups, reader)
            needed = [(each.host, each.port) for each in map(layout.producers.__getitem__, prepared.producers)]
            self._lines.keep_only([leader_address(source), *needed])
            attended = self._lines.attend(
                needed, Deadline(timeout_s, what=f"reaching the producers of version {version}")
            )
            undo.callback(self._lines.leave, needed)
            return NixlFetch(self, prepared, lease, attended, undo.pop_all(), planned=kept is None, timeout_s=timeout_s)

    def is_idle(self, _wait_s: float) -> bool:
        """What is given up ends with its session."""
        return True

    def close(self) -> None:
        self.discard_session()
        self._renewals.close()
        self._lines.close()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The session that lives. What goes wrong in it ends it, and is a FetchError."""
        if self._session is None:
            self._session = Session()
        try:
            yield self._session
        except FetchError:
            self.discard_session()
            raise
        except Exception as error:  # NIXL's errors have no base of their own.
            self.discard_session()
            raise FetchError(f"NIXL: {type(error).__name__}: {error}") from error

    def discard_session(self) -> None:
        """Nothing that it began to read is written any more."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _reader(self, source: SourceInfo) -> Reader:
        if not {"first_reader", "readers"} & source.keys():
            return Reader(self._rank, self._world_size, 0, self._world_size)
        first, count = source_field(source, "first_reader", int), source_field(source, "readers", int)
        if not 0 <= first <= count - self._world_size:
            raise FetchError(
                f"the source's first_reader is {first} and its readers are {count}: no place for the"
                f" {self._world_size} ranks of this engine"
            )
        return Reader(self._rank, self._world_size, first, count)

    def _let_in(self, leader: Channel, version: str, timeout_s: float) -> Opened:
        known = "" if self._layout is None else self._layout.name
        answer = leader.demand(Open(self._name, version, known), timeout_s)
        assert isinstance(answer, Opened), answer
        return answer


class NixlFetch:
    """One version, open to one rank."""

    def __init__(
        self,
        transport: NixlTransport,
        prepared: Prepared,
        lease: HeldLease,
        attended: Sequence[Channel],
        held: ExitStack,
        *,
        planned: bool,
        timeout_s: float,
    ) -> None:
        self.planned = planned
        """Whether its reads had to be planned; else they are those of the last load."""
        self.stamps: Mapping[str, str] = {}
        self._transport = transport
        self._prepared = prepared
        self._lease = lease
        self._attended = attended
        self._held = held
        self._timeout_s = timeout_s
        self._posted: set[int] = set()
        """Groups in flight."""
        self._failure: FetchError | None = None

    @property
    def manifest(self) -> Mapping[str, TensorMeta]:
        return self._prepared.layout.tensors

    def start(self, group: int, targets: Sequence[Target]) -> None:
        try:
            # After a failure there is nothing left to post with.
            if self._failure is None and group not in self._posted:
                self._post(group, targets)
        except FetchError as error:
            self._failure = error

    def fetch(self, group: int, targets: Sequence[Target]) -> Moved:
        if self._failure is not None:
            raise self._failure
        begin = time.monotonic()
        try:
            moved = self._fetch(group, targets)
        except FetchError as error:
            # The session that its transfers belonged to is gone.
            self._failure = error
            raise
        moved.transfer_s = time.monotonic() - begin
        return moved

    def close(self) -> None:
        if self._posted:
            # Still in flight into targets that are nobody's business any more.
            self._transport.discard_session()
            self._posted.clear()
        self._held.close()

    def _fetch(self, group: int, targets: Sequence[Target]) -> Moved:
        self._look()
        if group not in self._posted:
            self._post(group, targets)
        moved = Moved()
        with self._transport.session() as session:
            done = session.finish(self._prepared, group, timeout_s=self._timeout_s, look=self._look)
            for transfer in done:
                producer = self._prepared.layout.producers[transfer.producer]
                name = f"{producer.host}:{producer.port}"
                moved.by_producer[name] = moved.by_producer.get(name, 0) + transfer.nbytes
                moved.bytes += transfer.nbytes
        self._posted.remove(group)
        if group == len(self._prepared.transfers) - 1:
            self._lease.confirm()
        return moved

    def _post(self, group: int, targets: Sequence[Target]) -> None:
        with self._transport.session() as session:
            session.post(self._prepared, group, targets)
        self._posted.add(group)

    def _look(self) -> None:
        self._lease.check()
        for channel in self._attended:
            channel.check_alive()
