"""The samples of one request behind separate prefill and decode engines: who may start, and what their replies become.

`flow.py` takes such a request apart (`GatherSamples`). `io/gathering.py` gives each sample an exchange of its own,
tells here what becomes of it and carries out what follows; `fanout.py` joins the replies. The first sample of each
prompt goes ahead: when it has its prefill behind it the others start, so that they find the prompt in the prefill
engine's cache instead of computing it once each. One sample that can't be had ends the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.core.commands import CountClientGone, GatherSamples
from router.core.fanout import SampleStream, merge_samples
from router.core.label import HEADER_PREFIX, Making, joined_headers, joined_label
from router.core.replies import error_event, error_reply

Headers = list[tuple[str, str]]
_SHOWN_BYTES = 500
"""Of the error of a sample, where only words can be passed on."""


class StartSamples(msgspec.Struct, frozen=True):
    """Begin with these, in this order, until the gather is over."""

    samples: Sequence[int]


class StopSamples(msgspec.Struct, frozen=True):
    """End those that still run."""


class SendWhole(msgspec.Struct, frozen=True):
    """Send the client its whole reply."""

    status: int
    headers: Headers
    body: bytes


class BeginStream(msgspec.Struct, frozen=True):
    """Begin the client's stream."""

    status: int
    headers: Headers


class WriteStream(msgspec.Struct, frozen=True):
    """Go on with the client's stream."""

    data: bytes


class EndStream(msgspec.Struct, frozen=True):
    """End the client's stream with `last`."""

    last: bytes


GatherCommand = StartSamples | StopSamples | SendWhole | BeginStream | WriteStream | EndStream | CountClientGone


class Gather:
    """See the module text. Once it is over it asks for nothing more, whatever is told."""

    def __init__(self, asked: GatherSamples, makings: Callable[[], list[Making]]) -> None:
        """`makings`: of the samples that have started, in their order."""
        self.over = False
        self._asked = asked
        self._makings = makings
        self._count = len(asked.parts)
        self._left = self._count
        self._started: set[int] = set()
        self._replies: dict[int, bytes] = {}
        self._headers: Headers = []
        """Of the first whole reply."""
        self._wants_stream = asked.body.is_streaming
        self._streaming = False
        label = self._label if asked.body.wants_label else None
        self._stream = SampleStream(self._count, route=asked.body.route, per_prompt=asked.per_prompt, label=label)

    def start(self) -> list[GatherCommand]:
        return self._begin(range(0, self._count, self._asked.per_prompt))

    def client_gone(self) -> list[GatherCommand]:
        self.over = True
        return [CountClientGone(), StopSamples()]

    # -- what becomes of a sample --------------------------------------------------------------------------

    def prefilled(self, sample: int) -> list[GatherCommand]:
        """It has its prefill behind it, or is over: if it went ahead, the others of its prompt may go."""
        if self.over or sample % self._asked.per_prompt:
            return []
        return self._begin(range(sample + 1, sample + self._asked.per_prompt))

    def replied(self, sample: int, status: int, headers: Headers, body: bytes) -> list[GatherCommand]:
        """It has a whole reply."""
        if self.over:
            return []
        if status >= 400:
            return self._fail(status, headers, body)
        if self._wants_stream:
            return self._fail_by("an engine did not stream one of the samples")
        self._replies[sample] = body
        self._headers = self._headers or headers
        return self._one_over(sample)

    def began(self, status: int, headers: Headers) -> list[GatherCommand]:
        """The stream of one has begun."""
        if self.over or self._streaming:
            return []
        if not self._wants_stream:
            return self._fail_by("an engine streamed one of the samples")
        self._streaming = True
        return [BeginStream(status, headers)]

    def wrote(self, sample: int, data: bytes) -> bytes:
        """Lines of its stream; those of the client's."""
        return b"" if self.over else self._stream.feed(sample, data)

    def ended(self, sample: int) -> list[GatherCommand]:
        """Its stream is over."""
        if self.over:
            return []
        last = self._stream.end(sample)
        written: list[GatherCommand] = [WriteStream(last)] if last else []
        return [*written, *self._one_over(sample)]

    # -- inside --------------------------------------------------------------------------------------------

    def _begin(self, samples: range) -> list[GatherCommand]:
        fresh = [each for each in samples if each not in self._started]
        self._started.update(fresh)
        return [StartSamples(fresh)] if fresh else []

    def _one_over(self, sample: int) -> list[GatherCommand]:
        self._left -= 1
        if self._left:
            return self.prefilled(sample)
        self.over = True
        if self._streaming:
            return [EndStream(b"")]
        return [_error("no engine began to stream") if self._wants_stream else self._joined()]

    def _joined(self) -> SendWhole:
        merged = merge_samples(
            [self._replies[sample] for sample in range(self._count)],
            per_prompt=self._asked.per_prompt,
            label=self._label() if self._asked.body.wants_label else None,
        )
        if merged is None:
            return _error("an engine's reply to one of the samples can't be joined with the others")
        own = [each for each in self._headers if not each[0].startswith(HEADER_PREFIX)]
        return SendWhole(200, [*own, *joined_headers(self._makings())], merged)

    def _fail(self, status: int, headers: Headers, body: bytes) -> list[GatherCommand]:
        self.over = True
        if not self._streaming:
            return [StopSamples(), SendWhole(status, headers, body)]
        shown = body[:_SHOWN_BYTES].decode("utf-8", "replace")
        return [StopSamples(), EndStream(error_event(status, f"a sample failed: {shown}"))]

    def _fail_by(self, message: str) -> list[GatherCommand]:
        error = _error(message)
        return self._fail(error.status, error.headers, error.body)

    def _label(self) -> bytes:
        return joined_label(self._makings())


def _error(message: str) -> SendWhole:
    reply = error_reply(502, message)
    return SendWhole(reply.status, [("Content-Type", reply.content_type)], reply.body)
