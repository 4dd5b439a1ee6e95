"""What happens to a request's fields on the prefill leg, on the decode leg and in the reply.

`flow.py` calls it with the client's body; `connectors/handoff.py` knows how engines spell a handoff. A field without a
row in the table passes on both legs untouched, and only the values that change are ever decoded: a long prompt stays
the bytes that the client sent. `stream.py` does for streamed replies what `merge_reply` does for whole ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from connectors.handoff import PARAMS_FIELD, REMOTE_DECODE, handed_over
from router.core.errors import RequestRefused

Body = dict[str, msgspec.Raw]

_BODY: msgspec.json.Decoder[Body] = msgspec.json.Decoder(Body)
_LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_NULL = b"null"
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    """What one leg does with one field."""

    action: Literal["keep", "drop", "set", "set_if_sent"]
    value: bytes = b""


KEEP = Treatment(action="keep")
DROP = Treatment(action="drop")


def _set(value: bytes) -> Treatment:
    return Treatment(action="set", value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """One row of the table."""

    prefill: Treatment
    decode: Treatment


FIELDS: Mapping[str, FieldRule] = {
    # One token, however the client spells the cap: an engine that misses one generates the whole answer twice.
    "max_tokens": FieldRule(prefill=_set(b"1"), decode=KEEP),
    "max_completion_tokens": FieldRule(prefill=Treatment(action="set_if_sent", value=b"1"), decode=KEEP),
    # More than max_tokens would be refused by the engine.
    "min_tokens": FieldRule(prefill=DROP, decode=KEEP),
    # The one token must end the leg as "length": a leg that ends as "stopped" may come back without a handoff.
    "stop": FieldRule(prefill=DROP, decode=KEEP),
    "stop_token_ids": FieldRule(prefill=DROP, decode=KEEP),
    "ignore_eos": FieldRule(prefill=_set(b"true"), decode=KEEP),
    # A handoff serves one sample of one prompt.
    "n": FieldRule(prefill=_set(b"1"), decode=KEEP),
    "stream": FieldRule(prefill=_set(b"false"), decode=KEEP),
    "stream_options": FieldRule(prefill=DROP, decode=KEEP),
    # The engine that ran the prompt has them; asked of the other one they can kill it.
    "prompt_logprobs": FieldRule(prefill=KEEP, decode=DROP),
    # The decode leg's value is the handoff, put in by `decode_body`.
    PARAMS_FIELD: FieldRule(prefill=_set(REMOTE_DECODE), decode=DROP),
}

_OWNED = ("request_id",)
"""Fields of the router's own, sent to no engine. Engines take the id of an attempt from the X-Request-Id header;
a client's id may be in use twice."""


@dataclass(frozen=True, kw_only=True)
class ClientBody:
    """A request body whose values are still the client's bytes."""

    fields: Body
    raw: bytes
    session_id: str | None
    owned: tuple[str, ...]
    """Names of the router's own fields, present or not."""
    request_id: str | None
    """The client's own `request_id`, echoed where it sent no header."""

    def has(self, name: str) -> bool:
        """Is the field there, with a value that is not null?"""
        return name in self.fields and bytes(self.fields[name]) != _NULL

    def text(self, name: str) -> bytes:
        return bytes(self.fields[name]) if name in self.fields else _NULL

    def is_true(self, name: str) -> bool:
        """Could an engine read the field as true? Engines also take 1, "true", "yes" and their like."""
        return self.text(name) not in (_NULL, b"false")


def parse_body(raw: bytes, *, session_header: str | None, session_fields: tuple[str, ...]) -> ClientBody:
    """Read a body's top level; refuse what is not a JSON object in UTF-8."""
    try:
        if not raw.isascii():
            # Values are not decoded below, so nothing else would look at their encoding.
            raw.decode("utf-8")
        fields = _BODY.decode(raw)
        return ClientBody(
            fields=fields,
            raw=raw,
            session_id=session_header or _session_id(fields, session_fields),
            owned=(*_OWNED, *session_fields),
            request_id=_string(fields.get("request_id")),
        )
    except UnicodeDecodeError as error:
        raise RequestRefused(f"the body is not valid UTF-8: byte {error.start}", param=None) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestRefused(f"the body is not a JSON object: {error}", param=None) from error


def check_split(body: ClientBody) -> None:
    """Refuse what one handoff can't serve, naming the field."""
    if body.text("n") not in (_NULL, b"1", b"1.0"):
        raise RequestRefused("n must be 1 behind separate prefill and decode engines", param="n")
    if _prompt_count(body.text("prompt")) > 1:
        raise RequestRefused("prompt must be one prompt behind separate prefill and decode engines", param="prompt")
    if body.text("prompt_embeds").startswith(b"[") or (body.has("prompt_embeds") and body.has("prompt")):
        raise RequestRefused("prompt_embeds must be a single prompt, without a prompt beside it", param="prompt_embeds")
    if body.is_true("use_beam_search"):
        raise RequestRefused("beam search is not possible on a handoff from a prefill engine", param="use_beam_search")
    if body.has("prompt_logprobs") and body.is_true("stream"):
        raise RequestRefused("prompt_logprobs are not available when streaming", param="prompt_logprobs")
    if body.is_true("echo") and (body.has("messages") or body.has("logprobs")):
        # The engine would compute the prompt's log-probabilities on the decode side, which never ran the prompt.
        raise RequestRefused("echo with log-probabilities needs an engine that runs the prompt itself", param="echo")
    if body.text("truncate_prompt_tokens").lstrip(b'" ').startswith(b"-"):
        # "As long as the model allows" can depend on the cap, which differs between the legs: so would the prompt.
        raise RequestRefused("truncate_prompt_tokens must be a number of tokens here", param="truncate_prompt_tokens")
    if body.has(PARAMS_FIELD):
        raise RequestRefused(f"{PARAMS_FIELD} is set by the router", param=PARAMS_FIELD)


def single_body(body: ClientBody) -> bytes:
    """The body for an engine that does both: the client's, without the router's own fields."""
    if not any(name in body.fields for name in body.owned):
        return body.raw
    return msgspec.json.encode({name: value for name, value in body.fields.items() if name not in body.owned})


def prefill_body(body: ClientBody) -> bytes:
    """The P leg: one token of one sample, not streamed, its KV kept for another engine."""
    fields = {name: value for name, value in body.fields.items() if name not in body.owned}
    for name, rule in FIELDS.items():
        _apply(fields, name, rule.prefill)
    return msgspec.json.encode(fields)


def decode_body(body: ClientBody, handoff: bytes | None) -> bytes:
    """The D leg: the client's body and the whole handoff, byte for byte; without one the engine runs the prompt."""
    fields = {name: value for name, value in body.fields.items() if name not in body.owned}
    for name, rule in FIELDS.items():
        _apply(fields, name, rule.decode)
    if handoff is not None:
        fields[PARAMS_FIELD] = msgspec.Raw(handoff)
    return msgspec.json.encode(fields)


class _Choice(msgspec.Struct):
    finish_reason: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Timing(msgspec.Struct):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None


class _PrefillReply(msgspec.Struct):
    handoff: msgspec.Raw = msgspec.field(name=PARAMS_FIELD, default=msgspec.Raw())
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    usage: _Usage | None = None
    choices: list[_Choice] = msgspec.field(default_factory=list)
    metrics: _Timing | None = None


_PREFILL_REPLY: msgspec.json.Decoder[_PrefillReply] = msgspec.json.Decoder(_PrefillReply)


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """What the P leg's reply holds for the D leg and for the client."""

    handoff: bytes | None
    cached_tokens: int | None
    prompt_logprobs: bytes | None
    """Where the chat route has them: at the top."""
    choice_prompt_logprobs: bytes | None
    """Where the completions route has them: in each choice."""
    failed: bool
    """The engine says 200, and that it failed."""
    busy_s: float
    """How long the engine had the request until its one token was there, by its own clock; 0 where it does not say.
    Engines started with --enable-per-request-metrics say it."""


def read_prefill_reply(reply: bytes) -> PrefillResult | None:
    """The parts of a P reply that matter later; None if it can't be read."""
    try:
        parsed = _PREFILL_REPLY.decode(reply)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    details = parsed.usage.prompt_tokens_details if parsed.usage is not None else None
    first = parsed.choices[0] if parsed.choices else _Choice()
    return PrefillResult(
        handoff=handed_over(bytes(parsed.handoff)),
        cached_tokens=details.cached_tokens if details is not None else None,
        prompt_logprobs=_present(parsed.prompt_logprobs),
        choice_prompt_logprobs=_present(first.prompt_logprobs),
        failed=any(bytes(choice.finish_reason) == b'"error"' for choice in parsed.choices),
        busy_s=_busy_s(parsed.metrics),
    )


def _busy_s(timing: _Timing | None) -> float:
    if timing is None or timing.time_to_first_token_ms is None:
        return 0.0
    return max(0.0, (timing.queue_time_ms or 0.0) + timing.time_to_first_token_ms) / 1000


def reply_failed(reply: bytes) -> bool:
    """Does a 200 reply say that the engine failed (finish_reason "error")?"""
    if b'"error"' not in reply:
        return False
    result = read_prefill_reply(reply)
    return result is not None and result.failed


def merge_reply(reply: bytes, prefill: PrefillResult | None) -> bytes:
    """The D reply with what only the P engine knows; untouched where there is nothing to merge."""
    if prefill is None:
        return reply
    wants = prefill.prompt_logprobs is not None or prefill.choice_prompt_logprobs is not None
    if not wants and b'"cached_tokens"' not in reply:
        return reply
    try:
        fields = _BODY.decode(reply)
        if prefill.prompt_logprobs is not None:
            fields["prompt_logprobs"] = msgspec.Raw(prefill.prompt_logprobs)
        if prefill.choice_prompt_logprobs is not None and "choices" in fields:
            fields["choices"] = _merge_choices(fields["choices"], prefill.choice_prompt_logprobs)
        if "usage" in fields:
            fields["usage"] = _merge_usage(fields["usage"], prefill.cached_tokens)
    except (msgspec.MsgspecError, RecursionError):
        return reply
    return msgspec.json.encode(fields)


def _merge_choices(choices: msgspec.Raw, prompt_logprobs: bytes) -> msgspec.Raw:
    merged = [_BODY.decode(choice) for choice in _LIST.decode(choices)]
    for choice in merged:
        choice["prompt_logprobs"] = msgspec.Raw(prompt_logprobs)
    return msgspec.Raw(msgspec.json.encode(merged))


def _merge_usage(usage: msgspec.Raw, cached_tokens: int | None) -> msgspec.Raw:
    """The P engine's cached-token count: the D engine counts all that it was handed as cached."""
    if b'"cached_tokens"' not in bytes(usage):
        return usage
    fields = _BODY.decode(usage)
    if not bytes(fields.get("prompt_tokens_details", msgspec.Raw(_NULL))).startswith(b"{"):
        return usage
    details = _BODY.decode(fields["prompt_tokens_details"])
    if cached_tokens is None:
        details.pop("cached_tokens", None)
    else:
        details["cached_tokens"] = msgspec.Raw(b"%d" % cached_tokens)
    fields["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(details))
    return msgspec.Raw(msgspec.json.encode(fields))


def _apply(fields: Body, name: str, treatment: Treatment) -> None:
    if treatment.action == "drop":
        fields.pop(name, None)
    elif treatment.action == "set" or (treatment.action == "set_if_sent" and name in fields):
        fields[name] = msgspec.Raw(treatment.value)


def _present(raw: msgspec.Raw) -> bytes | None:
    value = bytes(raw)
    return None if value in (b"", _NULL) else value


def _session_id(fields: Body, names: tuple[str, ...]) -> str | None:
    for name in names:
        text = bytes(fields.get(name, msgspec.Raw(_NULL)))
        if text in (_NULL, b'""'):
            continue
        value = msgspec.json.decode(text)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise RequestRefused(f"{name} must be a string or an integer", param=name)
        return str(value)
    return None


def _string(raw: msgspec.Raw | None) -> str | None:
    value = msgspec.json.decode(raw) if raw is not None else None
    return value if isinstance(value, str) and value else None


def _prompt_count(prompt: bytes) -> int:
    """1 for a text or a list of token ids, without decoding either."""
    return len(_LIST.decode(prompt)) if _LIST_OF_PROMPTS.match(prompt) else 1
