"""A streamed reply on its way through: line by line, changed only where the P engine knows better.

`flow.py` makes one `StreamMerge` per relayed leg; `io/exchange.py` feeds it what arrives and writes what comes
out. Whole lines leave at once; of a line in the making only the beginning is kept, and not without end.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.core.split.reply import LABEL, add_label, merge_part, read_prefill_reply
from router.core.split.reply_parts import PrefillResult
from router.core.split.values import BODY, Body
from router.core.stream_events import ERROR_EVENT, EVENT, Event

FIRST_LINE_LIMIT = 1 << 20
"""Bytes before the first newline, the prompt's token ids aside: a leg that sends more of them answers nothing."""
LINE_LIMIT = 64 << 20
"""Bytes of any later line. The longest real ones carry the expert routing of a whole request."""

_DATA = b"data:"
_DONE = b"[DONE]"
_CACHED = b'"cached_tokens"'
_TOKEN_IDS = (b'"prompt_token_ids":[', b'"prompt_token_ids": [')
_EXPERTS = (b'"routed_experts":"', b'"routed_experts": "')


_SAME_IN_ALL_EVENTS = ("id", "object", "created", "model", "request_id")


class StreamMerge:
    """Feed bytes in, take bytes out. `label` is asked once, when the stream comes to its end."""

    def __init__(self, prefill: PrefillResult | None, *, label: Callable[[], bytes] | None = None) -> None:
        self._prefill = prefill
        self._label = label
        self._head = b""
        self._rest = bytearray()
        self._limit = FIRST_LINE_LIMIT
        self._output_tokens = 0
        self._marks: tuple[bytes, ...] = ()
        """What the lines have in which the P engine may know better."""
        self._counts = prefill is not None and prefill.experts is not None
        if prefill is not None:
            self._marks = (_CACHED, *_EXPERTS)
            if prefill.token_ids is not None:
                self._marks += _TOKEN_IDS
                self._limit += len(prefill.token_ids)
        self.engine_failed = False
        """An event told that the engine failed, after 200."""
        self.broken: str | None = None
        """Why the leg has to end: a line goes on past its limit. Nothing of it comes out any more."""

    def feed(self, data: bytes) -> bytes:
        """The whole lines that are complete by now."""
        if self.broken is not None:
            return b""
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(data)
            return b""
        lines = bytes(self._rest) + data[:end] if self._rest else data[:end]
        self._rest.clear()
        self._limit = LINE_LIMIT
        self._keep(data[end:])
        if b'"error"' in lines:
            self.engine_failed = self.engine_failed or failed_event(lines)
        if self._label is not None and not self._head:
            self._head = lines
        if not self._looks_inside(lines):
            return lines
        return b"".join([self._merge(line) for line in lines.splitlines(keepends=True)])

    def flush(self) -> bytes:
        """What is left of an unfinished last line."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def _keep(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > self._limit:
            self.broken = "a line of its stream goes on without end"
            self._rest.clear()

    def _looks_inside(self, lines: bytes) -> bool:
        if self._label is not None and (b'"usage"' in lines or _DONE in lines):
            return True
        return self._counts or any(mark in lines for mark in self._marks)

    def _merge(self, line: bytes) -> bytes:
        if not line.startswith(_DATA):
            return line
        text = line[len(_DATA) :].strip()
        if text == _DONE:
            return self._last_event() + line
        merged = text
        if self._prefill is not None:
            self._count(text)
            merged = merge_part(text, self._prefill, output_tokens=self._output_tokens)
        if self._label is not None and _is_usage(text):
            merged, self._label = add_label(merged, self._label()), None
        return line if merged is text else line.replace(text, merged, 1)

    def _count(self, text: bytes) -> None:
        """The output tokens so far: with them the rows of expert routing in the last event find their places."""
        if self._counts:
            event = _read_event(text)
            self._output_tokens += sum(len(choice.token_ids or ()) for choice in event.choices)

    def _last_event(self) -> bytes:
        """The label's own event, where no usage came that could carry it: without choices, and else like the others.
        OpenAI's client passes over events of another `object`."""
        if self._label is None:
            return b""
        label, self._label = self._label(), None
        fields = {name: raw for name, raw in _first_event(self._head).items() if name in _SAME_IN_ALL_EVENTS}
        event = msgspec.json.encode(fields | {"choices": msgspec.Raw(b"[]"), LABEL: msgspec.Raw(label)})
        return b"data: %b\n\n" % event


def failed_event(lines: bytes) -> bool:
    """Does one of these lines say that the engine failed? An error that names a 4xx is the client's."""
    for line in lines.splitlines():
        if not line.startswith(_DATA) or b'"error"' not in line:
            continue
        text = line[len(_DATA) :].strip()
        result = read_prefill_reply(text)
        if result is not None and result.failed:
            return True
        try:
            code = ERROR_EVENT.decode(text).error.code
        except (msgspec.MsgspecError, RecursionError):
            continue
        if not (isinstance(code, int) and 400 <= code < 500):
            return True
    return False


def _is_usage(text: bytes) -> bool:
    """Is it the last event with data, which has the usage and no choices?"""
    event = _read_event(text) if b'"usage"' in text else Event()
    return not event.choices and bytes(event.usage).startswith(b"{")


def _first_event(lines: bytes) -> Body:
    for line in lines.splitlines():
        if line.startswith(_DATA):
            try:
                return BODY.decode(line[len(_DATA) :])
            except (msgspec.MsgspecError, RecursionError):
                break
    return {}


def _read_event(text: bytes) -> Event:
    try:
        return EVENT.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return Event()
