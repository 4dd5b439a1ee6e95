"""Which streams can go on after a weight update, and what becomes of each request field when they do.

`flow.py` asks `tracked` once per request, before its first leg; `continuation.py` makes the next run's body by the
same table. The next run gets the tokens that the client already has as the end of its prompt. So a field whose effect
depends on what counts as *output* can't be carried over: the penalties that count output only, grammars, parsers,
budgets. Their streams end with an error event at an update, as all do without the setting. All else is exact, with
one thing to know: a seed is used again from its beginning, so a sampled continuation is a fair draw under the new
weights and not the one that an uncut run would have made. Caps of the engine's own generation config count anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from connectors.handoff import PARAMS_FIELD
from router.core.split.body import SAMPLING_FIELD
from router.core.split.client_body import ClientBody
from router.core.split.rules import Route
from router.core.split.values import Body, count_prompts, is_null, read, read_flag, read_number

RETURN_TOKEN_IDS = "return_token_ids"
_TRUE = msgspec.Raw(b"true")
_CONTENT_PARTS = re.compile(rb'"content"\s*:\s*\[')
_TEXT_PART = {"type", "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuedField:
    """One row: the next run's value is the client's, none, or made in `continuation.py`."""

    value: Literal["keep", "drop", "make"] = "keep"
    prevents: Callable[[msgspec.Raw], bool] | None = None
    """Does this value prevent an exact continuation? Asked only if it was sent and is not null."""


def _sent(_raw: msgspec.Raw) -> bool:
    return True


def _anything(raw: msgspec.Raw) -> bool:
    return read(raw) not in ([], {}, "")


def _not_zero(raw: msgspec.Raw) -> bool:
    return read(raw) != 0


def _several(raw: msgspec.Raw) -> bool:
    return (read_number(raw) or 1) > 1


def _several_prompts(raw: msgspec.Raw) -> bool:
    return count_prompts(raw) > 1


def _off(raw: msgspec.Raw) -> bool:
    return not read_flag(raw)


def _constrains(raw: msgspec.Raw) -> bool:
    """A response_format other than plain text."""
    value = read(raw)
    return not (isinstance(value, dict) and value.get("type") == "text")


def _has_media(raw: msgspec.Raw) -> bool:
    """The engine renders the prompt of such messages anew, whatever token ids it is given."""
    if _CONTENT_PARTS.search(raw) is None:
        return False
    messages = read(raw)
    if not isinstance(messages, list):
        return True
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.keys() != _TEXT_PART or part["type"] != "text" for part in parts)


_KEEP = ContinuedField()
_DROP = ContinuedField(value="drop")
_MAKE = ContinuedField(value="make")
_PREVENTS = ContinuedField(prevents=_sent)
_PREVENTS_IF_ANY = ContinuedField(prevents=_anything)
_PREVENTS_IF_ON = ContinuedField(prevents=read_flag)

_SAMPLING = {
    "temperature": _KEEP, "top_p": _KEEP, "top_k": _KEEP, "min_p": _KEEP, "seed": _KEEP, "logit_bias": _KEEP,
    "allowed_token_ids": _KEEP, "stop": _KEEP, "stop_token_ids": _KEEP, "ignore_eos": _KEEP, "logprobs": _KEEP,
    "logprob_token_ids": _KEEP, "stream_interval": _KEEP, "skip_special_tokens": _KEEP,
    "include_stop_str_in_output": _KEEP, "routed_experts_prompt_start": _KEEP,
    # Counts the prompt's tokens as well as the output's, so a token weighs the same on either side.
    "repetition_penalty": _KEEP,
    "presence_penalty": ContinuedField(prevents=_not_zero),
    "frequency_penalty": ContinuedField(prevents=_not_zero),
    # Of several tokens: the first may be delivered already, where the engine does not look for it.
    "bad_words": _PREVENTS_IF_ANY,
    # Depends on which contexts the output has had before.
    "watermarking": _PREVENTS_IF_ON,
    # Looks at whether the token before, of the output, was special too.
    "spaces_between_special_tokens": ContinuedField(prevents=_off),
    "repetition_detection": _PREVENTS,
    "thinking_token_budget": _PREVENTS,
    "structured_outputs": _PREVENTS,
    "n": ContinuedField(prevents=_several),
    "max_tokens": _MAKE,
    "min_tokens": _MAKE,
    "prompt_logprobs": _DROP,
}  # fmt: skip

_ALL_ROUTES = {
    "model": _KEEP, "priority": _KEEP, "cache_salt": _KEEP, "request_id": _KEEP, "stream": _KEEP,
    "stream_options": _KEEP, RETURN_TOKEN_IDS: _MAKE, PARAMS_FIELD: _PREVENTS, "ec_transfer_params": _PREVENTS,
}  # fmt: skip

_OPENAI_ROUTES = {
    **_ALL_ROUTES,
    **_SAMPLING,
    "user": _KEEP, "session_id": _KEEP, "add_special_tokens": _KEEP, "mm_payload": _KEEP, "return_mm_kwargs": _KEEP,
    "return_token_offsets": _KEEP, "return_tokens_as_token_ids": _KEEP, "max_completion_tokens": _MAKE,
    "use_beam_search": _PREVENTS_IF_ON, "best_of": ContinuedField(prevents=_several), "length_penalty": _KEEP,
    "early_stopping": _KEEP,
    # For extensions that may count anything.
    "vllm_xargs": _PREVENTS_IF_ANY,
    "response_format": ContinuedField(prevents=_constrains),
    # They were applied to the prompt that comes back as token ids.
    "truncate_prompt_tokens": _DROP,
    "truncation_side": _DROP,
}  # fmt: skip

_COMPLETIONS = {
    **_OPENAI_ROUTES,
    "prompt": ContinuedField(value="make", prevents=_several_prompts),
    "prompt_embeds": _PREVENTS,
    "suffix": _DROP,
    # The client has it. See `why_not` for the echo that can't be tracked.
    "echo": _DROP,
}

_CHAT = {
    **_OPENAI_ROUTES,
    # Kept, although the engine is given the token ids that it made of them: it asks for messages.
    "messages": ContinuedField(prevents=_has_media),
    "documents": _KEEP, "chat_template": _KEEP, "chat_template_kwargs": _KEEP, "add_generation_prompt": _KEEP,
    "continue_final_message": _KEEP, "reasoning_effort": _KEEP, "media_io_kwargs": _KEEP,
    "mm_processor_kwargs": _KEEP, "tool_choice": _KEEP, "parallel_tool_calls": _KEEP, "include_reasoning": _KEEP,
    "top_logprobs": _KEEP, "return_prompt_text": _KEEP,
    # A parser in the middle of a call can't be put back there. One in the middle of reasoning is seen in the stream.
    "tools": _PREVENTS_IF_ANY,
    "echo": _PREVENTS_IF_ON,
}  # fmt: skip

_GENERATE = {
    **_ALL_ROUTES,
    "token_ids": _MAKE, "sampling_params": _MAKE, "output_mode": _KEEP, "reasoning_ended": _KEEP,
    "reasoning_parser_kwargs": _KEEP,
    # The engine wants as many as token ids.
    "token_offsets": _DROP,
    "features": _PREVENTS,
    "content_parts": _PREVENTS_IF_ANY,
}  # fmt: skip

CONTINUED_FIELDS: Mapping[Route, Mapping[str, ContinuedField]] = {
    "completions": _COMPLETIONS,
    "chat": _CHAT,
    "generate": _GENERATE,
}

CONTINUED_SAMPLING_FIELDS: Mapping[str, ContinuedField] = {
    **_SAMPLING,
    "prompt_logprob_token_ids": _DROP, "prompt_logprob_start": _DROP, "flat_logprobs": _KEEP, "detokenize": _KEEP,
    "skip_reading_prefix_cache": _KEEP, "output_kind": _KEEP, "output_text_buffer_length": _KEEP, "skip_clone": _KEEP,
    "trace_decode_token_ids": _PREVENTS,
    "extra_args": _PREVENTS_IF_ANY,
}  # fmt: skip


def tracked(body: ClientBody) -> ClientBody | None:
    """The body whose stream tells its token ids; None where no stream could be continued exactly."""
    if not body.is_streaming or why_not(body) is not None:
        return None
    if body.route == "generate" or read_flag(body.fields.get(RETURN_TOKEN_IDS)):
        return body
    return with_fields(body, body.fields | {RETURN_TOKEN_IDS: _TRUE})


def with_fields(body: ClientBody, fields: Body) -> ClientBody:
    """The body with other fields; on the generate route its sampling fields stay. `raw` is still what came: legs are
    made of the fields."""
    sampling = body.sampling if body.route == "generate" else fields
    return msgspec.structs.replace(body, fields=fields, sampling=sampling)


def with_sampling(body: ClientBody, sampling: Body) -> ClientBody:
    """The body with other sampling fields, wherever they stand."""
    if body.route != "generate":
        return with_fields(body, sampling)
    fields = body.fields | {SAMPLING_FIELD: msgspec.Raw(msgspec.json.encode(sampling))}
    return with_fields(msgspec.structs.replace(body, sampling=sampling), fields)


def why_not(body: ClientBody) -> str | None:
    """Why the body's stream can't be continued exactly; None where it can."""
    name = _prevented(body.fields, CONTINUED_FIELDS[body.route])
    if name is None and body.route == "generate":
        name = _prevented(body.sampling or {}, CONTINUED_SAMPLING_FIELDS)
        if name is None and stop_texts(body) and read(body.fields.get("output_mode")) != "text":
            # The beginning of a stop text may be among the delivered tokens, and only their text would show it.
            name = "stop"
    if name is None and body.route == "completions" and read_flag(body.fields.get("echo")):
        # Asked for token ids, the engine leaves the prompt out of the text: that is the client's to choose.
        name = None if read_flag(body.fields.get(RETURN_TOKEN_IDS)) else "echo"
    return None if name is None else f"{name} can't be carried over"


def stop_texts(body: ClientBody) -> list[str]:
    value = read((body.sampling or {}).get("stop"))
    texts = value if isinstance(value, list) else [value]
    return [text for text in texts if isinstance(text, str) and text]


def _prevented(fields: Mapping[str, msgspec.Raw], table: Mapping[str, ContinuedField]) -> str | None:
    for name, raw in fields.items():
        row = table.get(name)
        if row is not None and row.prevents is not None and not is_null(raw) and row.prevents(raw):
            return name
    return None
