"""A stream that goes on after a weight update: the request's next run, and how the client's stream takes it up.

    an update ends the leg --> `continue_stream` --> Continuation: a next run
                                                 --> Ended: all was generated, only the last lines are missing
                                                 --> CannotContinue: an error event, with the reason

`flow.py` asks for it when a stream that has a `Delivered` (`delivered.py`) is interrupted. The next run is a fresh
attempt under the new epoch whose prompt is the old one plus the tokens that the client has, so all its KV is new. Its
lines pass through `stream.py`, `continued.py` and then the same `Delivered`: a third run is like the second.
`RelayedStream` joins the three.

Chats go on through their own route: engines take a prompt's token ids beside the handoff, in place of the messages.
Those before 0.32 pass over them and would begin the answer again. The first event says what the prompt was;
`continued.py` compares it and lets nothing of such a run through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from connectors.handoff import PARAMS_FIELD
from router.core.continuable import (
    CONTINUED_FIELDS,
    CONTINUED_SAMPLING_FIELDS,
    ContinuedField,
    tracked,
    why_not,
    with_fields,
    with_sampling,
)
from router.core.continued import Continued, cached_details
from router.core.delivered import DATA, DONE, Delivered
from router.core.split.client_body import ClientBody
from router.core.split.reply import LABEL
from router.core.split.rules import Route
from router.core.split.values import BODY, Body, is_null, read, read_number
from router.core.stream import StreamMerge

_PROMPT_PARAM = "prompt_token_ids"
_PROMPT_FIELD = {"completions": "prompt", "generate": "token_ids"}
_CAPS: dict[Route, tuple[str, ...]] = {
    "completions": ("max_tokens",),
    "chat": ("max_completion_tokens", "max_tokens"),
    "generate": ("max_tokens",),
}
"""Where both were sent, the first one holds."""
_COMPLETIONS_CAP = 16
"""What engines take for completions that name none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """The next run."""

    body: ClientBody
    stream: Continued | None
    """None where the client has no event yet."""
    chat_prompt: bytes | None
    """The prompt of a chat, see `leg_body`."""

    def leg_body(self, body: bytes) -> bytes:
        """What is sent in place of this body of one of the run's legs."""
        if self.chat_prompt is None:
            return body
        fields = BODY.decode(body)
        handoff = fields.get(PARAMS_FIELD)
        params = {} if handoff is None or is_null(handoff) else BODY.decode(handoff)
        params[_PROMPT_PARAM] = msgspec.Raw(self.chat_prompt)
        fields[PARAMS_FIELD] = msgspec.Raw(msgspec.json.encode(params))
        return msgspec.json.encode(fields)


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing to run."""

    last: bytes


@dataclass(frozen=True, slots=True)
class CannotContinue:
    reason: str


class RelayedStream:
    """A leg's `StreamMerge` with what makes its stream the rest of another, and keeps it so that it can go on."""

    def __init__(self, merge: StreamMerge, continued: Continued | None, delivered: Delivered) -> None:
        self._merge = merge
        self._continued = continued
        self._delivered = delivered

    @property
    def engine_failed(self) -> bool:
        return self._merge.engine_failed

    @property
    def broken(self) -> str | None:
        """Why the leg has to end: see `StreamMerge` and `Continued`."""
        strayed = self._continued.strayed if self._continued is not None else None
        return strayed or self._merge.broken

    def feed(self, data: bytes) -> bytes:
        lines = self._merge.feed(data)
        if lines and self._continued is not None:
            lines = self._continued.feed(lines)
        return self._delivered.feed(lines) if lines else b""

    def flush(self) -> bytes:
        """At the end of a stream that is not continued."""
        return self._delivered.flush() + self._merge.flush()


def continue_stream(
    body: ClientBody, delivered: Delivered, *, version: str, label: bytes | None = None
) -> Continuation | Ended | CannotContinue:
    """How a stream goes on whose leg was ended. `body` is the client's own, `version` the weights of that leg, `label`
    what the client asked to be told at the end, as of now."""
    delivered.end_leg(version)
    reason = why_not(body) or delivered.lost
    if reason is not None:
        return CannotContinue(reason)
    next_body = tracked(body)
    assert next_body is not None, "a request that does not stream"
    count = len(delivered.tokens)
    cap = _cap(body)
    if delivered.finished or (cap is not None and count >= cap):
        return Ended(_ending(body, delivered, label))
    if count == 0:
        stream = Continued(body.route, delivered, prompt=None) if delivered.begun else None
        return Continuation(body=next_body, stream=stream, chat_prompt=None)
    prompt = _prompt(body, delivered)
    if prompt is None:
        return CannotContinue("the engine does not tell the prompt's tokens")
    whole = prompt[:-1] + b"," + ",".join(map(str, delivered.tokens)).encode() + b"]"
    return Continuation(
        body=_with_prompt(_shortened(next_body, count), whole),
        stream=Continued(body.route, delivered, prompt=whole),
        chat_prompt=whole if body.route == "chat" else None,
    )


def _prompt(body: ClientBody, delivered: Delivered) -> bytes | None:
    return bytes(body.fields["token_ids"]) if body.route == "generate" else delivered.prompt


def _cap(body: ClientBody) -> int | None:
    for name in _CAPS[body.route]:
        cap = read_number((body.sampling or {}).get(name))
        if cap is not None:
            return cap
    return _COMPLETIONS_CAP if body.route == "completions" else None


def _shortened(body: ClientBody, count: int) -> ClientBody:
    """Without what was done in the first run, and with room for the rest only."""
    shorter = with_fields(body, _left(body.fields, CONTINUED_FIELDS[body.route]))
    sampling = (shorter.sampling or {}).copy()
    if body.route == "generate":
        sampling = _left(sampling, CONTINUED_SAMPLING_FIELDS)
    if body.route == "completions" and is_null(sampling.get("max_tokens")):
        sampling["max_tokens"] = msgspec.Raw(b"%d" % _COMPLETIONS_CAP)
    for name, least in (*((cap, 1) for cap in _CAPS[body.route]), ("min_tokens", 0)):
        number = read_number(sampling.get(name))
        if number is not None:
            sampling[name] = msgspec.Raw(b"%d" % max(least, number - count))
    return with_sampling(shorter, sampling)


def _left(fields: Body, table: Mapping[str, ContinuedField]) -> Body:
    return {name: raw for name, raw in fields.items() if name not in table or table[name].value != "drop"}


def _with_prompt(body: ClientBody, prompt: bytes) -> ClientBody:
    """A chat's prompt has no field of its own, see `Continuation.leg_body`."""
    name = _PROMPT_FIELD.get(body.route)
    return body if name is None else with_fields(body, body.fields | {name: msgspec.Raw(prompt)})


def _ending(body: ClientBody, delivered: Delivered, label: bytes | None) -> bytes:
    """The rest of a stream whose tokens are all delivered."""
    if delivered.done:
        return b""
    events: list[dict[str, object]] = []
    if not delivered.finished:
        text: dict[str, object] = {"delta": {}} if body.route == "chat" else {"text": "", "token_ids": []}
        events.append({"choices": [{"index": 0, **text, "finish_reason": "length"}]})
    options = read(body.fields.get("stream_options"))
    told: dict[str, object] = {}
    if not delivered.usage_given:
        if isinstance(options, dict) and options.get("include_usage"):
            told["usage"] = _usage(body, delivered)
        if label is not None:
            told[LABEL] = msgspec.Raw(label)
    if told:
        events.append({"choices": [], **told})
    lines = [msgspec.json.encode({**delivered.head, **event}) for event in events]
    return b"".join(b"%b %b\n\n" % (DATA, line) for line in (*lines, DONE))


def _usage(body: ClientBody, delivered: Delivered) -> dict[str, object]:
    prompt = (_prompt(body, delivered) or b"").count(b",") + 1
    count = len(delivered.tokens)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + count,
        "completion_tokens": count,
    }
    details = cached_details(delivered.prefill)
    return usage | ({"prompt_tokens_details": details} if details else {})
