"""One request for several samples behind separate prefill and decode engines: an exchange per sample, one reply of them
all.

`exchange.py` makes one when its flow says `GatherSamples`; what the samples' replies become together is decided in
`core/fanout.py`. The first sample of each prompt goes ahead: when it has its prefill behind it the others start, so
that they find the prompt in the prefill engine's cache instead of computing it once each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from router.core.commands import CountClientGone, GatherSamples
from router.core.events import Arrived, Interrupted
from router.core.fanout import SampleStream, merge_samples
from router.core.label import HEADER_PREFIX, Making, joined_headers, joined_label
from router.core.replies import error_event, error_reply

if TYPE_CHECKING:
    from router.io.exchange import Client, Exchange, ExchangeTools

Headers = list[tuple[str, str]]
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
        self._gathering.replied(self._sample, status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        self._gathering.started(status, headers)

    def write(self, data: bytes) -> None:
        self._gathering.wrote(self._sample, data)

    def end(self) -> None:
        self._gathering.ended(self._sample)


class Gathering:
    """See the module text."""

    def __init__(
        self, client: Client, request: Arrived, tools: ExchangeTools, gather: GatherSamples, begin: Begin
    ) -> None:
        self.client = client
        self._request = request
        self._tools = tools
        self._gather = gather
        self._begin = begin
        self._exchanges: dict[int, Exchange] = {}
        self._replies: dict[int, bytes] = {}
        body = gather.body
        label = self._label if body.wants_label else None
        self._stream = SampleStream(len(gather.parts), route=body.route, per_prompt=gather.per_prompt, label=label)
        self._headers: Headers = []
        self._left = len(gather.parts)
        self._streaming = self._over = False

    def start_all(self) -> None:
        """Send the first sample of each prompt on its way; each starts the others of its prompt."""
        for first in range(0, len(self._gather.parts), self._gather.per_prompt):
            if not self._over:  # a refusal may have come at once
                self._start(first)

    def client_gone(self) -> None:
        self._tools.metrics.counted[CountClientGone()] += 1
        self._over = True
        self._end_all()
        self._close()

    def client_writable(self, writable: bool) -> None:
        for exchange in tuple(self._exchanges.values()):
            exchange.client_writable(writable)

    # -- from the samples ----------------------------------------------------------------------------------

    def prefilled(self, sample: int) -> None:
        """A sample has its prefill behind it, or is over: the others of its prompt may go."""
        if sample % self._gather.per_prompt == 0:
            for other in range(sample + 1, sample + self._gather.per_prompt):
                if other not in self._exchanges and not self._over:
                    self._start(other)

    def replied(self, sample: int, status: int, headers: Headers, body: bytes) -> None:
        """A sample has a whole reply. One that failed is the reply of the whole request."""
        if self._over:
            return
        if status >= 400 or self._streaming:
            self._fail(status, headers, body)
            return
        self._replies[sample] = body
        self._headers = self._headers or headers
        self._one_over(sample)

    def started(self, status: int, headers: Headers) -> None:
        if not self._streaming and not self._over:
            self._streaming = True
            self.client.start(status, headers)

    def wrote(self, sample: int, data: bytes) -> None:
        if not self._over:
            out = self._stream.feed(sample, data)
            if out:
                self.client.write(out)

    def ended(self, sample: int) -> None:
        if not self._over:
            out = self._stream.end(sample)
            if out:
                self.client.write(out)
            self._one_over(sample)

    # -- inside --------------------------------------------------------------------------------------------

    def _start(self, sample: int) -> None:
        whole = self._request
        request = msgspec.structs.replace(
            whole,
            number=next(self._tools.numbers),
            sample_of=whole,
            sample=self._gather.parts[sample],
            deadline=self._gather.deadline,
            request_key=f"{whole.request_key}-s{sample}",
        )
        exchange = self._begin(_SampleClient(self, sample), request)
        exchange.on_prefilled = lambda: self.prefilled(sample)
        self._exchanges[sample] = exchange
        exchange.feed(request)

    def _one_over(self, sample: int) -> None:
        self._left -= 1
        self.prefilled(sample)
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        if self._streaming:
            self.client.end()
        else:
            self._reply()
        self._close()

    def _reply(self) -> None:
        makings = self._makings()
        merged = merge_samples(
            [self._replies[sample] for sample in range(len(self._gather.parts))],
            per_prompt=self._gather.per_prompt,
            label=self._label() if self._gather.body.wants_label else None,
        )
        if merged is None:
            error = error_reply(502, "an engine's reply to one of the samples can't be joined with the others")
            self.client.reply(error.status, [("Content-Type", error.content_type)], error.body)
        else:
            own = [each for each in self._headers if not each[0].startswith(HEADER_PREFIX)]
            self.client.reply(200, [*own, *joined_headers(makings)], merged)

    def _fail(self, status: int, headers: Headers, body: bytes) -> None:
        """One sample can't be had: neither can the request."""
        self._over = True
        self._end_all()
        if self._streaming:
            self.client.write(error_event(status, f"a sample failed: {body[:500].decode('utf-8', 'replace')}"))
            self.client.end()
        else:
            self.client.reply(status, headers, body)
        self._close()

    def _end_all(self) -> None:
        for exchange in tuple(self._exchanges.values()):
            exchange.feed(Interrupted("asked"))

    def _close(self) -> None:
        """Let go of everything: samples and gathering know each other, and bodies are large."""
        self._over = True
        for exchange in self._exchanges.values():
            exchange.on_prefilled = None
        self._exchanges.clear()
        self._replies.clear()
        self._gather.parts.clear()
        del self._stream

    def _makings(self) -> list[Making]:
        return [exchange.flow.legs.making for _, exchange in sorted(self._exchanges.items())]

    def _label(self) -> bytes:
        return joined_label(self._makings())
