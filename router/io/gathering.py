"""One request for several samples behind separate prefill and decode engines: an exchange per sample, one reply of them
all.

`exchange.py` makes one when its flow says `GatherSamples`; what the samples' replies become together is decided in
`core/fanout.py`. The first sample of each prompt goes ahead: when it has its prefill behind it the others start, so
that they find the prompt in the prefill engine's cache instead of computing it once each.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from router.core.commands import CountClientGone
from router.core.events import Arrived, Interrupted
from router.core.fanout import SampleStream, merge_samples
from router.core.label import joined_label
from router.core.replies import error_event, error_reply
from router.core.split import ClientBody

if TYPE_CHECKING:
    from router.io.exchange import Client, Exchange, ExchangeTools, RequestFacts

Headers = list[tuple[str, str]]


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
        self,
        client: Client,
        facts: RequestFacts,
        tools: ExchangeTools,
        body: ClientBody,
        parts: list[ClientBody],
        per_prompt: int,
    ) -> None:
        self.client = client
        self._facts = facts
        self._tools = tools
        self._body = body
        self._parts = parts
        self._per_prompt = per_prompt
        self._exchanges: dict[int, Exchange] = {}
        self._replies: dict[int, bytes] = {}
        label = self._label if body.wants_label else None
        self._stream = SampleStream(len(parts), route=body.route, per_prompt=per_prompt, label=label)
        self._headers: Headers = []
        self._left = len(parts)
        self._streaming = self._over = False
        self._asked_id: str | None = None

    def start_all(self, asked_id: str | None) -> None:
        """Send the first sample of each prompt on its way; each starts the others of its prompt. `asked_id`: by which
        the client may abort them."""
        self._asked_id = asked_id
        for first in range(0, len(self._parts), self._per_prompt):
            self._start(first)

    def client_gone(self) -> None:
        self._tools.metrics.count(CountClientGone())
        self._close()
        self._end_all()

    def client_writable(self, writable: bool) -> None:
        for exchange in tuple(self._exchanges.values()):
            exchange.client_writable(writable)

    # -- from the samples ----------------------------------------------------------------------------------

    def prefilled(self, sample: int) -> None:
        """A sample has its prefill behind it, or is over: the others of its prompt may go."""
        if sample % self._per_prompt == 0:
            for other in range(sample + 1, sample + self._per_prompt):
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
        from router.io.exchange import Exchange, RequestFacts

        facts = self._facts
        number = next(self._tools.numbers)
        key = f"{facts.key}-s{sample}"
        own = RequestFacts(
            number=number,
            key=key,
            path=facts.path,
            asked_id=self._asked_id,
            forwarded=facts.forwarded,
            min_version=facts.min_version,
        )
        exchange = Exchange(_SampleClient(self, sample), own, self._tools, time.monotonic(), counted=False)
        exchange.on_prefilled = lambda: self.prefilled(sample)
        self._exchanges[sample] = exchange
        exchange.feed(
            Arrived(
                number=number,
                route=self._body.route,
                path=facts.path,
                body=self._parts[sample].raw,
                session_header=self._body.session_id or facts.key,
                min_version=facts.min_version,
                request_key=key,
            )
        )

    def _one_over(self, sample: int) -> None:
        self._left -= 1
        self.prefilled(sample)
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        self._close()
        if self._streaming:
            self.client.end()
            return
        replies = [self._replies[sample] for sample in range(len(self._parts))]
        label = self._label() if self._body.wants_label else None
        merged = merge_samples(replies, per_prompt=self._per_prompt, label=label)
        if merged is None:
            error = error_reply(502, "an engine's reply to one of the samples can't be joined with the others")
            self.client.reply(error.status, [("Content-Type", error.content_type)], error.body)
        else:
            self.client.reply(200, self._headers, merged)

    def _fail(self, status: int, headers: Headers, body: bytes) -> None:
        """One sample can't be had: neither can the request."""
        self._close()
        self._end_all()
        if self._streaming:
            self.client.write(error_event(status, f"a sample failed: {body[:500].decode('utf-8', 'replace')}"))
            self.client.end()
        else:
            self.client.reply(status, headers, body)

    def _end_all(self) -> None:
        for exchange in tuple(self._exchanges.values()):
            exchange.feed(Interrupted("asked"))

    def _close(self) -> None:
        self._over = True
        if self._body.session_id is None:
            # The samples shared a session of their own, so that they met on one prefill replica.
            self._tools.desk.finish_session(self._facts.key)

    def _label(self) -> bytes:
        return joined_label([exchange.flow.legs.making for _, exchange in sorted(self._exchanges.items())])
