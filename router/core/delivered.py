"""What a client already has of a stream: kept so that the stream can go on after a weight update.

`flow.py` makes one `Delivered` per stream; the lines pass through it last, after `stream.py` (and, from the second
leg on, after `continuation.py`), and what comes out is written to the client.

**The client is always at the end of a token.** An engine sends a token before its text where the text is not known
yet: a character of several tokens, or what may become a stop text. If a stream broke off there, the next run could
not say the rest of the text. So such an event waits here for the one that completes its text, and both leave together;
with stop texts the text is divided anew among the tokens that it belongs to. What still waits when the leg is ended is
forgotten and generated again. Without stop texts nearly every event is complete and leaves at once.
"""

from __future__ import annotations

import re
from array import array

import msgspec

from router.core.continuable import RETURN_TOKEN_IDS, stop_texts
from router.core.split.client_body import ClientBody
from router.core.split.numbers import CUT, cut_numbers
from router.core.split.reply_parts import PrefillResult
from router.core.split.values import BODY, Body, read_flag

DATA = b"data:"
DONE = b"[DONE]"
PROMPT_TOKEN_IDS = b'"prompt_token_ids"'
SAME_IN_ALL_EVENTS = ("id", "request_id", "object", "created", "model")

_END = b"\n\n"
_NULL = b"null"
_TOKEN_IDS = b'"token_ids":['
_SPACED_TOKEN_IDS = re.compile(rb'"token_ids":\s+\[[\d\s,]*\]')
_NO_TOKEN_IDS = b'"token_ids":null'
_TEXT = re.compile(rb'"(?:text|content)":\s*("(?:[^"\\]|\\.)*")')
_MOST_WAITING = 64
"""Events beyond what stop texts account for. No character has so many tokens; a model that runs on in tokens without
text is not held back for it."""


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    """Of a plain chat: no reasoning, no tool calls."""

    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw()


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: msgspec.Raw = msgspec.Raw()


_EVENT: msgspec.json.Decoder[_Event] = msgspec.json.Decoder(_Event)


class _Waiting(msgspec.Struct):
    line: bytes
    choice: _Choice
    text: str
    end: int | None
    """Characters of the whole output up to the end of its last token; None where its text is not known yet."""


class Delivered:
    """Feed whole lines in, take the client's lines out."""

    __slots__ = (
        "_engine_keeps",
        "_pending",
        "_strips",
        "_waiting",
        "_window",
        "begun",
        "chars",
        "done",
        "ends_in_several",
        "finished",
        "head",
        "last_text",
        "logprobs",
        "lost",
        "prefill",
        "prompt",
        "spans",
        "tokens",
        "usage_given",
    )

    def __init__(self, body: ClientBody, prefill: PrefillResult | None) -> None:
        """`body` is the client's own, `prefill` what the first P leg said."""
        self.prefill = prefill
        self.head: Body = {}
        """What all events have in common."""
        self.prompt: bytes | None = None
        """Token ids as a JSON list, where the stream tells them."""
        self.tokens = array("I")
        self.chars = 0
        self.begun = self.finished = self.usage_given = self.done = False
        """Has the client an event, the finish reason, the usage, the end?"""
        self.lost: str | None = None
        """Why the stream can't be continued any more."""
        self.last_text = ""
        self.ends_in_several = False
        """The last event had several tokens: whether its text is complete is not known for certain."""
        self.logprobs = msgspec.Raw()
        self.spans: list[tuple[str, int, int]] = []
        """Weight version, first token and end of each leg that was ended."""
        self._strips = body.route != "generate" and not read_flag(body.fields.get(RETURN_TOKEN_IDS))
        longest = max(map(len, stop_texts(body)), default=1)
        self._window = longest - 1
        """So many characters may still become part of a stop text."""
        included = read_flag((body.sampling or {}).get("include_stop_str_in_output"))
        self._engine_keeps = 0 if included else self._window
        self._waiting: list[_Waiting] = []
        self._pending = ""
        """Text that came and is not given."""

    def feed(self, lines: bytes) -> bytes:
        """The lines for the client, each event whole and ended by a blank line."""
        return b"".join([self._line(line) for line in lines.splitlines() if line])

    def flush(self) -> bytes:
        """What waits, when the stream is over and will not be continued."""
        return self._give_all()

    def end_leg(self, version: str) -> None:
        """The leg was ended by an update: forget what the client does not have."""
        self._waiting.clear()
        self._pending = ""
        if not self.begun:
            self.head, self.prompt = {}, None
        start = self.spans[-1][2] if self.spans else 0
        if len(self.tokens) > start:
            self.spans.append((version, start, len(self.tokens)))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(DATA):
            return line + b"\n"
        if self.lost is not None:
            return self._stripped(line) + _END
        known = line if self.head else self._first(line)
        shown = known if self._strips else line
        try:
            event = _EVENT.decode(known[len(DATA) :])
        except (msgspec.MsgspecError, RecursionError):
            if known[len(DATA) :].strip() == DONE:
                self.done = True
            else:
                self.lost = "an event holds more than plain text"
            return self._give_all() + self._stripped(shown) + _END
        if not event.choices:
            self.usage_given = self.usage_given or bytes(event.usage).startswith(b"{")
            return self._give_all() + shown + _END
        return self._choice(self._stripped(shown), event.choices[0])

    def _choice(self, line: bytes, choice: _Choice) -> bytes:
        text = choice.text if choice.delta is None else choice.delta.content
        if choice.token_ids is None and text:
            self.lost = "an event does not tell its tokens"
        elif choice.token_ids and choice.delta is not None and text is None:
            self.lost = "an event holds tokens that are no text"
        complete = not choice.token_ids or text is None or (text and self._window == 0) or self.lost is not None
        if complete and not self._waiting:
            return self._give(line, choice, text or "")
        return self._wait(line, choice, text or "")

    def _wait(self, line: bytes, choice: _Choice, text: str) -> bytes:
        self._pending += text
        known = self.chars + len(self._pending) + self._engine_keeps
        self._waiting.append(_Waiting(line, choice, text, known if text else None))
        if len(self._waiting) > self._window + _MOST_WAITING:
            self.lost = "its tokens run ahead of their text"
        if choice.finish_reason is not None or self.lost is not None:
            return self._give_all()
        # No stop text begins before this any more.
        settled = known - self._window
        count = 0
        for number, waiting in enumerate(self._waiting, 1):
            if waiting.end is not None and waiting.end <= settled:
                count = number
        leaving, self._waiting = self._waiting[:count], self._waiting[count:]
        return b"".join([self._give_waiting(waiting) for waiting in leaving])

    def _give_all(self) -> bytes:
        if not self._waiting:
            return b""
        leaving, self._waiting = self._waiting, []
        leaving[-1].end = self.chars + len(self._pending)
        return b"".join([self._give_waiting(waiting) for waiting in leaving])

    def _give_waiting(self, waiting: _Waiting) -> bytes:
        length = 0 if waiting.end is None else max(0, waiting.end - self.chars)
        text, self._pending = self._pending[:length], self._pending[length:]
        line = waiting.line if text == waiting.text else _with_text(waiting.line, text)
        return self._give(line, waiting.choice, text)

    def _give(self, line: bytes, choice: _Choice, text: str) -> bytes:
        self.begun = True
        if choice.token_ids:
            self.tokens.extend(choice.token_ids)
            self.ends_in_several = len(choice.token_ids) > 1
            self.logprobs = choice.logprobs
        if text:
            self.chars += len(text)
            self.last_text = text
        if choice.finish_reason is not None:
            self.finished = True
        return line + _END

    def _first(self, line: bytes) -> bytes:
        """The line without the prompt's token ids, which only the first event has."""
        rest, numbers = cut_numbers(line, PROMPT_TOKEN_IDS, shortest=0)
        if numbers is not None:
            self.prompt = bytes(numbers)
            rest = rest.replace(CUT, _NULL, 1)
        try:
            fields = BODY.decode(rest[len(DATA) :])
        except (msgspec.MsgspecError, RecursionError):
            return rest
        self.head = {name: fields[name] for name in SAME_IN_ALL_EVENTS if name in fields}
        return rest

    def _stripped(self, line: bytes) -> bytes:
        if not self._strips:
            return line
        at = line.rfind(_TOKEN_IDS)
        if at < 0:
            return _SPACED_TOKEN_IDS.sub(_NO_TOKEN_IDS, line, 1)
        return line[:at] + _NO_TOKEN_IDS + line[line.index(b"]", at) + 1 :]


def _with_text(line: bytes, text: str) -> bytes:
    match = _TEXT.search(line)
    if match is None:
        return line
    start, end = match.span(1)
    return line[:start] + msgspec.json.encode(text) + line[end:]
