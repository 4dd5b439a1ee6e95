"""Several samples or prompts in one request, served by one prefill/decode pair per sample.

One handoff serves one sample of one prompt: with more its decode leg answers 200 with wrong tokens (field case A04).
So behind separate engines the request is taken apart: `samples` gives one body per sample, each of which lives its own
life in a `flow.py`, and `merge_samples` or `SampleStream` makes one reply of theirs, as an engine would have given it.
A sample's index is the engines' own: prompt * samples of each prompt + sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from router.core.errors import RequestRefused
from router.core.split import ClientBody, Route
from router.core.split.body import SAMPLING_FIELD
from router.core.split.reply import LABEL
from router.core.split.values import BODY, LIST, Body, count_prompts, is_null, read, read_number

_ONCE_PER_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")
"""Asked of a prompt's first sample only: an engine that scores a prompt reads no cache for it."""

_SCORES_IN_CHOICE = "prompt_logprobs"
_OF_THE_PROMPT_IN_EVENTS = ("prompt_token_ids", "mm_placeholders")
_SAME_IN_ALL_EVENTS = ("id", "request_id", "created")
_DATA = b"data:"
_DONE = b"[DONE]"
_NULL = msgspec.Raw(b"null")
_NO_SEED = -1
"""What engines read as no seed."""


def samples_per_prompt(body: ClientBody) -> int:
    count = body.sampling.get("n") if body.sampling is not None else None
    return max(1, read_number(count) or 1) if count is not None else 1


def has_several(body: ClientBody) -> bool:
    """Samples or prompts."""
    return samples_per_prompt(body) > 1 or _count_prompts(body, at_most=2) > 1


def samples(body: ClientBody, *, limit: int) -> list[ClientBody] | None:
    """One body per sample, in index order; None where there is one sample of one prompt."""
    each, prompts = samples_per_prompt(body), _count_prompts(body, at_most=limit + 1)
    total = each * max(1, prompts)
    if total == 1:
        return None
    if total > limit:
        message = f"samples of all prompts must be at most {limit} together: send several requests"
        raise RequestRefused(message, param="n" if each > 1 else "prompt")
    texts: list[msgspec.Raw | None] = [*LIST.decode(body.fields["prompt"])] if prompts > 1 else [None]
    return [_one(body, prompt, sample) for prompt in texts for sample in range(each)]


def merge_samples(replies: Sequence[bytes], *, per_prompt: int, label: bytes | None = None) -> bytes | None:
    """One reply of the samples' whole replies, which come in index order; None if one is no reply of one sample."""
    try:
        parts = [BODY.decode(reply) for reply in replies]
        merged = parts[0]
        merged["choices"] = msgspec.Raw(msgspec.json.encode(_choices(parts, per_prompt)))
    except (msgspec.MsgspecError, RecursionError, LookupError, ValueError):
        return None
    usages = [read(part.get("usage")) for part in parts]
    if isinstance(usages[0], dict):
        merged["usage"] = msgspec.Raw(msgspec.json.encode(_sum_usage(usages, per_prompt)))
    if "metrics" in merged:
        # They are of one sample; engines leave them out as well.
        merged["metrics"] = _NULL
    if label is not None:
        merged[LABEL] = msgspec.Raw(label)
    return msgspec.json.encode(merged)


class SampleStream:
    """Feed whole lines of the samples' streams in, take the lines of the client's stream out."""

    def __init__(self, count: int, *, route: Route, per_prompt: int, label: Callable[[], bytes] | None = None) -> None:
        self._route = route
        self._per_prompt = per_prompt
        self._label = label
        self._running = set(range(count))
        self._common: Body = {}
        """What all events of the stream have in common: the first one's."""
        self._usage_event: Body | None = None
        self._usages: list[Any] = [None] * count

    def feed(self, sample: int, data: bytes) -> bytes:
        """Whole lines of one sample's stream, as `StreamMerge` gives them."""
        return b"".join([self._line(sample, line) for line in data.splitlines()])

    def end(self, sample: int) -> bytes:
        """The sample's stream is over; with the last one the client's is. A second time it does nothing."""
        if sample not in self._running:
            return b""
        self._running.remove(sample)
        return b"" if self._running else self._last_events() + _DATA + b" " + _DONE + b"\n\n"

    def _line(self, sample: int, line: bytes) -> bytes:
        if not line.startswith(_DATA):
            # The blank lines between events are put in again below.
            return line + b"\n" if line else b""
        text = line[len(_DATA) :].strip()
        if text == _DONE:
            return self.end(sample)
        try:
            event = BODY.decode(text)
            choices = [BODY.decode(choice) for choice in LIST.decode(event.get("choices", b"[]"))]
        except (msgspec.MsgspecError, RecursionError):
            return _event(text)
        if "choices" not in event:
            # An error: the engine's words stay as they are.
            return _event(text)
        if not self._common:
            self._common = {name: event[name] for name in _SAME_IN_ALL_EVENTS if name in event}
        event |= self._common
        if not choices and not is_null(event.get("usage")):
            self._usages[sample] = read(event["usage"])
            self._usage_event = self._usage_event or event
            return b""
        for choice in choices:
            choice["index"] = msgspec.Raw(b"%d" % sample)
        event["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        if self._route == "generate" and sample > 0:
            # Here they are of the whole reply and stand in its first event; on the other routes of each choice's.
            for name in _OF_THE_PROMPT_IN_EVENTS:
                event.pop(name, None)
        return _event(msgspec.json.encode(event))

    def _last_events(self) -> bytes:
        """The usage of all samples, where the engines told theirs, and the label."""
        last = self._usage_event
        if last is not None:
            last.pop("metrics", None)
            last["usage"] = msgspec.Raw(msgspec.json.encode(_sum_usage(self._usages, self._per_prompt)))
        if self._label is not None:
            last = last if last is not None else self._common | {"choices": msgspec.Raw(b"[]")}
            last[LABEL] = msgspec.Raw(self._label())
        return _event(msgspec.json.encode(last)) if last is not None else b""


def _event(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


def _count_prompts(body: ClientBody, *, at_most: int) -> int:
    return count_prompts(body.fields.get("prompt"), at_most=at_most) if body.route == "completions" else 1


def _one(body: ClientBody, prompt: msgspec.Raw | None, sample: int) -> ClientBody:
    fields, size = body.fields.copy(), body.size
    if prompt is not None:
        size += len(memoryview(prompt)) - len(memoryview(fields["prompt"]))
        fields["prompt"] = prompt
    sampling = fields if body.route != "generate" else (body.sampling or {}).copy()
    if "n" in sampling:
        sampling["n"] = msgspec.Raw(b"1")
    seed = read_number(sampling.get("seed"))
    if seed is not None and seed != _NO_SEED:
        sampling["seed"] = msgspec.Raw(b"%d" % (seed + sample))
    if sample > 0:
        for name in _ONCE_PER_PROMPT:
            sampling.pop(name, None)
    if body.route == "generate":
        fields[SAMPLING_FIELD] = msgspec.Raw(msgspec.json.encode(sampling))
    # The label is of the whole reply.
    return msgspec.structs.replace(body, fields=fields, sampling=sampling, size=size, wants_label=False)


def _choices(parts: list[Body], per_prompt: int) -> list[Body]:
    choices: list[Body] = []
    for index, part in enumerate(parts):
        (raw,) = LIST.decode(part["choices"])
        choice = BODY.decode(raw)
        choice["index"] = msgspec.Raw(b"%d" % index)
        sample = index % per_prompt
        scores = choices[index - sample].get(_SCORES_IN_CHOICE) if sample else None
        if scores is not None:
            choice[_SCORES_IN_CHOICE] = scores
        choices.append(choice)
    return choices


def _sum_usage(usages: Sequence[Any], per_prompt: int) -> dict[str, Any]:
    """What the prompt cost counts once per prompt, as its first sample tells; what was generated counts in all."""
    told = [usage for usage in usages if isinstance(usage, dict)]
    first = [usage for usage in usages[::per_prompt] if isinstance(usage, dict)]
    merged = told[0] | {
        "prompt_tokens": _sum(first, "prompt_tokens"),
        "completion_tokens": _sum(told, "completion_tokens"),
        "total_tokens": _sum(first, "prompt_tokens") + _sum(told, "completion_tokens"),
    }
    for name, counted in (("prompt_tokens_details", first), ("completion_tokens_details", told)):
        details = [usage[name] for usage in counted if isinstance(usage.get(name), dict)]
        if details:
            merged[name] = {
                part: _sum(details, part) if isinstance(value, int) else value for part, value in details[0].items()
            }
    return merged


def _sum(parts: list[dict[str, Any]], name: str) -> int:
    return sum(part[name] for part in parts if isinstance(part.get(name), int))
