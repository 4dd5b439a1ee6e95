"""One request for several samples as a conversation between its client, its `Gather` and an exchange per sample.

`exchange.py` makes one when its flow says `GatherSamples`. It decides nothing: see `core/gather.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from router.core.commands import CountClientGone, GatherSamples
from router.core.events import Arrived, Interrupted
from router.core.gather import (
    BeginStream,
    EndStream,
    Gather,
    GatherCommand,
    Headers,
    SendWhole,
    StartSamples,
    StopSamples,
    WriteStream,
)
from router.core.label import Making

if TYPE_CHECKING:
    from router.io.exchange import Client, Exchange, ExchangeTools

Begin = Callable[["Client", Arrived], "Exchange"]
"""Makes the exchange of one sample."""


class _SampleClient:
    """Where one sample's reply goes."""

    def __init__(self, gathering: Gathering, sample: int) -> None:
        self._gathering = gathering
        self._sample = sample

    @property
    def writable(self) -> bool:
        return self._gathering.client.writable

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        self._gathering.take(self._gathering.core.replied(self._sample, status, headers, body))

    def start(self, status: int, headers: Headers) -> None:
        self._gathering.take(self._gathering.core.began(status, headers))

    def write(self, data: bytes) -> None:
        out = self._gathering.core.wrote(self._sample, data)
        if out:
            self._gathering.client.write(out)

    def end(self) -> None:
        self._gathering.take(self._gathering.core.ended(self._sample))


class Gathering:
    """See the module text."""

    def __init__(
        self, client: Client, request: Arrived, tools: ExchangeTools, asked: GatherSamples, begin: Begin
    ) -> None:
        self.client = client
        self.core = Gather(asked, self._makings)
        self._request = request
        self._tools = tools
        self._asked = asked
        self._begin = begin
        self._exchanges: dict[int, Exchange] = {}

    def start(self) -> None:
        self.take(self.core.start())

    def client_gone(self) -> None:
        self.take(self.core.client_gone())

    def client_writable(self, writable: bool) -> None:
        for exchange in tuple(self._exchanges.values()):
            exchange.client_writable(writable)

    def take(self, commands: list[GatherCommand]) -> None:
        """Carry out what the core says; a sample that starts may be answered meanwhile."""
        for command in commands:
            match command:
                case StartSamples(samples):
                    for sample in samples:
                        if not self.core.over:
                            self._start(sample)
                case StopSamples():
                    for exchange in tuple(self._exchanges.values()):
                        exchange.feed(Interrupted("asked"))
                case SendWhole(status, headers, body):
                    self.client.reply(status, headers, body)
                case BeginStream(status, headers):
                    self.client.start(status, headers)
                case WriteStream(data):
                    self.client.write(data)
                case EndStream(last):
                    if last:
                        self.client.write(last)
                    self.client.end()
                case CountClientGone():
                    self._tools.metrics.counted[command] += 1
        if self.core.over:
            self._let_go()

    # -- inside --------------------------------------------------------------------------------------------

    def _start(self, sample: int) -> None:
        whole = self._request
        request = msgspec.structs.replace(
            whole,
            number=next(self._tools.numbers),
            sample_of=whole,
            sample=self._asked.parts[sample],
            deadline=self._asked.deadline,
            request_key=f"{whole.request_key}-s{sample}",
        )
        exchange = self._begin(_SampleClient(self, sample), request)
        exchange.on_prefilled = lambda: self.take(self.core.prefilled(sample))
        self._exchanges[sample] = exchange
        exchange.feed(request)

    def _let_go(self) -> None:
        """Samples and gathering know each other, and bodies are large."""
        for exchange in self._exchanges.values():
            exchange.on_prefilled = None
        self._exchanges.clear()

    def _makings(self) -> list[Making]:
        return [exchange.flow.legs.making for _, exchange in sorted(self._exchanges.items())]
