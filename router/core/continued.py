"""The lines of a stream's second or later run, told as the rest of the stream that the client has.

`continuation.py` makes one for the next run. It is fed with what `stream.py` makes of the engine's lines, and what
comes out goes through the request's `Delivered`.
"""

from __future__ import annotations

import msgspec

from router.core.delivered import DATA, PROMPT_TOKEN_IDS, Delivered
from router.core.split.numbers import CUT, cut_numbers
from router.core.split.reply_parts import PrefillResult
from router.core.split.rules import Route
from router.core.split.values import BODY, LIST, Body, is_null, read

_END = b"\n\n"
_NULL = b"null"
_OF_THE_FIRST_EVENT = ("prompt_token_ids", "mm_placeholders")
_OF_ONE_RUN = "metrics"
_CACHE_COUNTS = ("cached_tokens", "created_cache_tokens")


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Offsets(msgspec.Struct):
    tokens: list[str] = []
    text_offset: list[int] = []


_OFFSETS: msgspec.json.Decoder[_Offsets] = msgspec.json.Decoder(_Offsets)
_SPANS: msgspec.json.Decoder[list[_Span]] = msgspec.json.Decoder(list[_Span])


class Continued:
    """Feed whole lines in, take the stream's further lines out."""

    def __init__(self, route: Route, delivered: Delivered, *, prompt: bytes | None) -> None:
        """`prompt` is what the run was given as token ids; None where it starts the answer again."""
        self.strayed: str | None = None
        """Why this run is not the rest of the stream. Nothing of it comes out any more: the leg has to end."""
        self._route = route
        self._head = delivered.head
        self._count = len(delivered.tokens)
        self._prefill = delivered.prefill
        self._spans = [_Span(*span) for span in delivered.spans]
        self._text_offset = _next_text_offset(delivered.logprobs)
        # Generate takes its prompt as it is, and says what it was only if asked.
        self._expected = _compact(prompt) if prompt is not None and route != "generate" else None
        # An engine whose prompt ends inside a character begins its text with that of the whole prompt.
        self._suspects = delivered.last_text if delivered.ends_in_several else ""
        self._chars = delivered.chars

    def feed(self, lines: bytes) -> bytes:
        out = b"".join([self._line(line) for line in lines.splitlines() if line])
        return out if self.strayed is None else b""

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(DATA):
            return line + b"\n"
        text, numbers = line[len(DATA) :].strip(), None
        if PROMPT_TOKEN_IDS in text:
            text, numbers = cut_numbers(text, PROMPT_TOKEN_IDS, shortest=0)
            text = text.replace(CUT, _NULL, 1)
        try:
            event = BODY.decode(text)
            choices = [BODY.decode(choice) for choice in LIST.decode(event["choices"])]
            if choices and self._expected is not None:
                self._check_prompt(numbers)
            if choices and self._route == "chat" and "role" in BODY.decode(choices[0]["delta"]):
                return b""
            self._rewrite(event, choices)
        except (msgspec.MsgspecError, RecursionError, LookupError):
            # The end, or an error in the engine's own words.
            return line + _END
        return b"data: " + msgspec.json.encode(event) + _END

    def _check_prompt(self, numbers: memoryview | None) -> None:
        if numbers is None or _compact(bytes(numbers)) != self._expected:
            self.strayed = "the engine did not take up the answer where it stopped"
        self._expected = None

    def _rewrite(self, event: Body, choices: list[Body]) -> None:
        event |= {name: value for name, value in self._head.items() if name in event}
        if self._route == "generate":
            for name in _OF_THE_FIRST_EVENT:
                event.pop(name, None)
        for choice in choices:
            self._check_text(choice)
            self._shift_offsets(choice)
            self._shift_spans(choice)
        if choices:
            event["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        if self._count and not is_null(event.get("usage")):
            event.pop(_OF_ONE_RUN, None)
            event["usage"] = msgspec.Raw(msgspec.json.encode(self._usage(read(event["usage"]))))

    def _check_text(self, choice: Body) -> None:
        if not self._suspects:
            return
        delta = BODY.decode(choice["delta"]) if "delta" in choice else choice
        text = read(delta.get("text") or delta.get("content"))
        if isinstance(read(choice.get("stop_reason")), str):
            # Of the prompt or of the answer? Cut off at the stop text, one looks like the other.
            self.strayed = (
                "a stop text ended the run at once, maybe in the prompt: it may have ended inside a character"
            )
        if not isinstance(text, str) or not text:
            return
        if len(text) > self._chars and self._suspects in text:
            self.strayed = "the engine said the prompt again: it ended inside a character"
        self._suspects = ""

    def _shift_offsets(self, choice: Body) -> None:
        """Completions count where in the text each scored token begins."""
        if self._text_offset == 0 or is_null(choice.get("logprobs")):
            return
        logprobs = BODY.decode(choice["logprobs"])
        if "text_offset" in logprobs:
            offsets = [offset + self._text_offset for offset in _OFFSETS.decode(choice["logprobs"]).text_offset]
            logprobs["text_offset"] = msgspec.Raw(msgspec.json.encode(offsets))
            choice["logprobs"] = msgspec.Raw(msgspec.json.encode(logprobs))

    def _shift_spans(self, choice: Body) -> None:
        """Generate says at the end which weights made which tokens; an engine knows its own run only."""
        if is_null(choice.get("weight_versions")):
            return
        own = _SPANS.decode(choice["weight_versions"])
        shifted = [_Span(span.version, span.start + self._count, span.end + self._count) for span in own]
        spans: list[_Span] = []
        for span in (*self._spans, *shifted):
            if spans and spans[-1].version == span.version:
                span = _Span(span.version, spans.pop().start, span.end)
            spans.append(span)
        choice["weight_versions"] = msgspec.Raw(msgspec.json.encode(spans))

    def _usage(self, usage: object) -> object:
        """As of one run: what was delivered counts as output. The sum stays."""
        if not isinstance(usage, dict):
            return usage
        usage["prompt_tokens"] -= self._count
        usage["completion_tokens"] += self._count
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            for name in _CACHE_COUNTS:
                count = getattr(self._prefill, name, None)
                if count is None:
                    # Of a prompt that also had output in it, and read under other weights.
                    details.pop(name, None)
                elif name in details:
                    details[name] = count
        return usage


def cached_details(prefill: PrefillResult | None) -> dict[str, int]:
    """What the first prefill leg said of its cache."""
    counts = {name: getattr(prefill, name, None) for name in _CACHE_COUNTS}
    return {name: count for name, count in counts.items() if count is not None}


def _next_text_offset(logprobs: msgspec.Raw) -> int:
    """Where the token after these begins."""
    if not bytes(logprobs).startswith(b"{"):
        return 0
    last = _OFFSETS.decode(logprobs)
    return last.text_offset[-1] + len(last.tokens[-1]) if last.text_offset and last.tokens else 0


def _compact(numbers: bytes) -> bytes:
    return numbers.translate(None, b" \t\r\n")
