"""The prefill leg's reply, and what of it belongs in the client's.

`flow.py` reads the first and merges it into the decode leg's whole reply; `stream.py` does so event by event.
"""

from __future__ import annotations

import re

import msgspec

from connectors.handoff import handed_over
from router.core.split.experts import join_experts
from router.core.split.numbers import CUT, cut_numbers
from router.core.split.reply_parts import ABSENT, COUNTED, PREFILL_REPLY, Choice, PrefillReply, PrefillResult, Timing
from router.core.split.values import BODY, LIST, Body, is_null, read_number

LABEL = "headrace"
"""The reply's field that says what produced it."""

_NULL = b"null"
_TOKEN_IDS = b'"prompt_token_ids"'
_CACHED = b'"cached_tokens"'
_CACHE_COUNT = re.compile(rb'("(cached_tokens|created_cache_tokens)"\s*:\s*)\d+')
_EXPERTS = "routed_experts"
_EXPERTS_KEY = b'"routed_experts"'
_HAS_EXPERTS = re.compile(rb'"routed_experts"\s*:\s*"')


_NO_SCORES: Body = {}


def read_prefill_reply(reply: bytes) -> PrefillResult | None:
    """The parts of a P reply that matter later; None if it can't be read."""
    rest, token_ids = cut_numbers(reply, _TOKEN_IDS)
    try:
        parsed = PREFILL_REPLY.decode(rest)
        first = parsed.choices[0] if parsed.choices else Choice()
        if token_ids is not None and CUT not in (bytes(parsed.prompt_token_ids), bytes(first.prompt_token_ids)):
            # They stand somewhere else: inside the handoff, which stays as it is.
            parsed, token_ids = PREFILL_REPLY.decode(reply), None
            first = parsed.choices[0] if parsed.choices else Choice()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    details = parsed.usage.prompt_tokens_details if parsed.usage is not None else None
    scored = parsed.prompt_logprobs is not ABSENT or parsed.prompt_token_id_logprobs is not ABSENT
    return PrefillResult(
        handoff=handed_over(bytes(parsed.handoff)),
        cached_tokens=details.cached_tokens if details is not None else None,
        created_cache_tokens=details.created_cache_tokens if details is not None else None,
        scores=_scores(parsed) if scored else _NO_SCORES,
        choice_scores=_NO_SCORES if is_null(first.prompt_logprobs) else {"prompt_logprobs": first.prompt_logprobs},
        token_ids=token_ids or _value(parsed.prompt_token_ids) or _value(first.prompt_token_ids),
        experts=first.routed_experts.encode() if first.routed_experts is not None else None,
        failed="error" in [choice.finish_reason for choice in parsed.choices],
        busy_s=_busy_s(parsed.metrics),
    )


def reply_failed(reply: bytes) -> bool:
    """Is a 200 reply none: no JSON object, or one that says that the engine failed (finish_reason "error")?"""
    text = reply.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return True
    if b'"error"' not in reply:
        return False
    result = read_prefill_reply(reply)
    return result is not None and result.failed


def merge_reply(reply: bytes, prefill: PrefillResult | None, *, label: bytes | None = None) -> bytes:
    """The D reply with what only the P engine knows, and the label; untouched where there is nothing to add."""
    merged = merge_part(reply, prefill, output_tokens=None) if prefill is not None else reply
    return merged if label is None else add_label(merged, label)


def add_label(reply: bytes, label: bytes) -> bytes:
    """A JSON object with `label`, a JSON text, as one more field."""
    end = reply.rfind(b"}")
    if end < 0:
        return reply
    comma = b"" if reply[:end].strip() == b"{" else b","
    return b'%b%b"%b":%b}' % (reply[:end], comma, LABEL.encode(), label)


def merge_part(part: bytes, prefill: PrefillResult, *, output_tokens: int | None) -> bytes:
    """A whole reply, or one event of a stream; `output_tokens` are those sent so far, None where `part` says it."""
    rest, token_ids = part, None
    if prefill.token_ids is not None:
        rest, token_ids = cut_numbers(part, _TOKEN_IDS, shortest=0)
    try:
        merged = _merge_fields(rest, prefill, output_tokens)
    except (msgspec.MsgspecError, RecursionError):
        return part
    if token_ids is None or prefill.token_ids is None:
        return merged
    return merged.replace(CUT, prefill.token_ids, 1)


def _merge_fields(part: bytes, prefill: PrefillResult, output_tokens: int | None) -> bytes:
    # Without a handoff the D engine ran the prompt, and its rows are whole.
    joins = prefill.handoff is not None and _EXPERTS_KEY in part and _HAS_EXPERTS.search(part) is not None
    if not (joins or prefill.scores or prefill.choice_scores):
        return _with_counts(part, prefill) if _CACHED in part else part
    fields = BODY.decode(part)
    if (joins or prefill.choice_scores) and "choices" in fields:
        count = output_tokens if output_tokens is not None else _output_tokens(fields)
        fields["choices"] = _merge_choices(fields["choices"], prefill, count if joins else None)
    if "usage" in fields:
        fields["usage"] = _merge_usage(fields["usage"], prefill)
    fields.update(prefill.scores)
    return msgspec.json.encode(fields)


def _with_counts(part: bytes, prefill: PrefillResult) -> bytes:
    """Only the usage changes, so the rest need not be taken apart."""
    usage = COUNTED.decode(part).usage
    text = bytes(usage)
    if part.count(text) == 1:
        return part.replace(text, bytes(_merge_usage(usage, prefill)))
    fields = BODY.decode(part)
    if "usage" in fields:
        fields["usage"] = _merge_usage(usage, prefill)
    return msgspec.json.encode(fields)


def _merge_choices(choices: msgspec.Raw, prefill: PrefillResult, output_tokens: int | None) -> msgspec.Raw:
    """`output_tokens`: None where the expert routing is left as it is."""
    merged = [BODY.decode(choice) for choice in LIST.decode(choices)]
    for choice in merged:
        choice.update(prefill.choice_scores)
        if output_tokens is not None and not is_null(choice.get(_EXPERTS)):
            choice[_EXPERTS] = _joined(bytes(choice[_EXPERTS]), prefill, output_tokens)
    return msgspec.Raw(msgspec.json.encode(merged))


def _joined(experts: bytes, prefill: PrefillResult, output_tokens: int) -> msgspec.Raw:
    """Null where there is no whole: rows of a prompt that the engine never ran would look like right ones."""
    joined = None
    if prefill.experts is not None:
        joined = join_experts(prefill.experts, experts.strip(b'"'), output_tokens=output_tokens)
    return msgspec.Raw(_NULL if joined is None else b'"%b"' % joined)


def _output_tokens(fields: Body) -> int:
    usage = BODY.decode(fields["usage"]) if "usage" in fields else {}
    return read_number(usage.get("completion_tokens")) or 0


def _merge_usage(usage: msgspec.Raw, prefill: PrefillResult) -> msgspec.Raw:
    """The P engine's cache counts, null where it tells none: the D engine counts all that it was handed as cached."""
    counts = {b"cached_tokens": prefill.cached_tokens, b"created_cache_tokens": prefill.created_cache_tokens}

    def put(found: re.Match[bytes]) -> bytes:
        count = counts[found[2]]
        return found[1] + (_NULL if count is None else b"%d" % count)

    return msgspec.Raw(_CACHE_COUNT.sub(put, bytes(usage)))


def _busy_s(timing: Timing | None) -> float:
    if timing is None or timing.time_to_first_token_ms is None:
        return 0.0
    return max(0.0, (timing.queue_time_ms or 0.0) + timing.time_to_first_token_ms) / 1000


def _scores(reply: PrefillReply) -> Body:
    told = {"prompt_logprobs": reply.prompt_logprobs, "prompt_token_id_logprobs": reply.prompt_token_id_logprobs}
    return {name: raw for name, raw in told.items() if not is_null(raw)}


def _value(raw: msgspec.Raw) -> bytes | None:
    return None if is_null(raw) else bytes(raw)
