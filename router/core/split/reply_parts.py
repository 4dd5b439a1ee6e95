"""The parts of engines' replies that `reply.py` reads, and what it makes of a prefill leg's."""

from __future__ import annotations

from typing import Annotated

import msgspec

from connectors.handoff import PARAMS_FIELD
from router.core.split.values import Body

ABSENT = msgspec.Raw()


class Choice(msgspec.Struct):
    finish_reason: str | None = None
    prompt_logprobs: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    routed_experts: str | None = None


_Count = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""What can be passed on between processes; no prompt has more tokens."""


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None
    created_cache_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class Timing(msgspec.Struct):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None


class PrefillReply(msgspec.Struct):
    handoff: msgspec.Raw = msgspec.field(name=PARAMS_FIELD, default=ABSENT)
    prompt_logprobs: msgspec.Raw = ABSENT
    prompt_token_id_logprobs: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    usage: _Usage | None = None
    choices: list[Choice] = []
    metrics: Timing | None = None


class _Counted(msgspec.Struct):
    usage: msgspec.Raw = ABSENT


PREFILL_REPLY: msgspec.json.Decoder[PrefillReply] = msgspec.json.Decoder(PrefillReply)
COUNTED: msgspec.json.Decoder[_Counted] = msgspec.json.Decoder(_Counted)


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the P leg's reply holds for the D leg and for the client."""

    handoff: bytes | None
    cached_tokens: int | None
    created_cache_tokens: int | None
    scores: Body
    """The prompt's scores, where chat and generate have them: at the top."""
    choice_scores: Body
    """Where completions has them: in each choice."""
    token_ids: bytes | memoryview | None
    """The prompt's token ids; one list, wherever it stands."""
    experts: bytes | None
    """The prompt's rows of expert routing."""
    failed: bool
    """The engine says 200, and that it failed."""
    busy_s: float
    """How long the engine had the request until its one token was there, by its own clock; 0 where it does not say.
    Engines started with --enable-per-request-metrics say it."""
