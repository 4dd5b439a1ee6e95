"""The split table against the request and reply models of the installed engine: no field is left to luck."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from router.core.errors import RequestRefused
from router.core.fanout import samples
from router.core.split import (
    FIELDS,
    SAMPLING_FIELDS,
    FieldRule,
    Route,
    check_split,
    decode_body,
    parse_body,
    prefill_body,
)
from router.core.split.experts import join_experts
from router.core.split.values import read_flag, read_number
from router.core.stream import StreamMerge

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

OF_THE_DECODE_ENGINE = {"prompt_text", "mm_placeholders", "multimodal_tokens"}
"""What replies say of the prompt and the decode engine knows without having run it: it renders the prompt too."""


def request_models() -> dict[Route, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return {"completions": CompletionRequest, "chat": ChatCompletionRequest, "generate": GenerateRequest}


def sampling_fields() -> set[str]:
    from vllm.sampling_params import SamplingParams

    return {field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")}


def reply_fields(route: Route) -> set[str]:
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.scale_out.token_in_token_out import protocol as generate
    from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo

    models: dict[Route, list[Any]] = {
        "completions": [completion.CompletionResponse, completion.CompletionResponseChoice],
        "chat": [chat.ChatCompletionResponse, chat.ChatCompletionResponseChoice],
        "generate": [
            *(generate.GenerateTokensResponse, generate.GenerateTokensChoice),
            *(generate.GenerateTextResponse, generate.GenerateTextChoice),
        ],
    }
    return {name for model in (*models[route], PromptTokenUsageInfo) for name in model.model_fields}


def no_row(table: Mapping[str, FieldRule], fields: set[str]) -> list[str]:
    return sorted(fields - set(table))


@pytest.mark.parametrize("route", sorted(FIELDS))
def test_every_request_field_has_a_row(route: Route) -> None:
    fields = request_models()[route].model_fields
    missing = no_row(FIELDS[route], set(fields) | {field.alias for field in fields.values() if field.alias})
    assert not missing, f"{route}: no row in the split table for {', '.join(missing)}"


def test_every_sampling_field_of_generate_has_a_row() -> None:
    missing = no_row(SAMPLING_FIELDS, sampling_fields())
    assert not missing, f"sampling_params: no row in the split table for {', '.join(missing)}"


def test_every_stream_option_is_known() -> None:
    from vllm.entrypoints.generate.base.protocol import StreamOptions

    assert set(StreamOptions.model_fields) == {"include_usage", "continuous_usage_stats"}


@pytest.mark.parametrize("route", sorted(FIELDS))
def test_what_a_reply_says_of_the_prompt_is_merged_or_known_to_the_decode_engine(route: Route) -> None:
    tables = [FIELDS[route], SAMPLING_FIELDS] if route == "generate" else [FIELDS[route]]
    merged = {rule.merged for table in tables for rule in table.values() if rule.merged is not None}
    fields = reply_fields(route)
    assert merged <= fields
    # prefill-side figures of the cache come with the usage, without having been asked for.
    merged |= {"cached_tokens", "created_cache_tokens"}
    telling = {
        name for name in fields if any(part in name for part in ("prompt", "experts", "cache", "multimodal", "mm_"))
    }
    missing = sorted(telling - merged - OF_THE_DECODE_ENGINE)
    assert not missing, f"{route}: the reply's {', '.join(missing)} may need the prefill engine's"


# -- the legs in the engine's eyes ------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "model": "m", "max_tokens": 400, "n": 1.0, "seed": 3, "stop": ["x"], "stop_token_ids": [1], "min_tokens": 2,
    "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}, "stream_interval": 3,
    "structured_outputs": {"regex": "a+"}, "logprob_token_ids": [5], "allowed_token_ids": [1, 2], "bad_words": ["no"],
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "thinking_token_budget": 5,
}  # fmt: skip
BODIES: dict[Route, dict[str, Any]] = {
    "completions": COMMON | {"prompt": [1, 2, 3], "logprobs": 5},
    "chat": COMMON | {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5},
}


def sampled(route: Route, body: bytes) -> Any:
    """The engine's own sampling parameters of a body."""
    request = request_models()[route].model_validate_json(body)
    assert request.kv_transfer_params
    return request, request.to_sampling_params(max_tokens=request.max_tokens, default_sampling_params={})


@pytest.mark.parametrize("route", sorted(BODIES))
def test_a01_a02_the_engine_reads_one_plain_token_on_the_prefill_leg_and_the_clients_on_the_other(route: Route) -> None:
    body = parse_body(json.dumps(BODIES[route]).encode(), route=route, session_header=None, session_fields=())
    check_split(body)
    request, params = sampled(route, prefill_body(body, salt="s"))
    assert (params.max_tokens, params.min_tokens, params.n, params.stop, params.stop_token_ids) == (1, 0, 1, [], [])
    assert (params.ignore_eos, request.stream, request.stream_options, request.cache_salt) == (True, False, None, "s")
    assert (
        params.logprobs is params.logprob_token_ids is params.structured_outputs is params.repetition_detection is None
    )
    assert params.thinking_token_budget is None
    request, params = sampled(route, decode_body(body, b'{"do_remote_prefill":true}', salt="s"))
    assert (params.max_tokens, params.min_tokens, params.stop, params.seed, request.stream) == (400, 2, ["x"], 3, True)
    assert (params.ignore_eos, params.logprob_token_ids, params.thinking_token_budget) == (False, [5], 5)
    assert params.structured_outputs.regex == "a+"


def test_a01_a02_the_same_on_the_generate_route() -> None:
    sampling = {name: value for name, value in COMMON.items() if name not in ("model", "stream", "stream_options")}
    client = {"token_ids": [1, 2], "stream": True, "sampling_params": sampling | {"skip_reading_prefix_cache": True}}
    body = parse_body(json.dumps(client).encode(), route="generate", session_header=None, session_fields=())
    check_split(body)
    request = request_models()["generate"].model_validate_json(prefill_body(body, salt="s"))
    params = request.sampling_params
    assert (params.max_tokens, params.min_tokens, params.n, params.stop, params.stop_token_ids) == (1, 0, 1, [], [])
    assert (params.ignore_eos, request.stream, request.cache_salt) == (True, False, "s")
    assert params.logprob_token_ids is params.structured_outputs is params.repetition_detection is None
    request = request_models()["generate"].model_validate_json(decode_body(body, b'{"a":1}', salt="s"))
    params = request.sampling_params
    assert (params.max_tokens, params.stop, params.ignore_eos, request.stream) == (400, ["x"], False, True)
    assert (params.skip_reading_prefix_cache, request.kv_transfer_params) == (False, {"a": 1})


# -- values in the engine's eyes --------------------------------------------------------------------------

SPELLINGS: list[Any] = [
    0, 1, 2, -1, 1.0, 2.0, 1.5, True, False, None, "1", "2", " 2 ", "+2", "2.0", "-1", "1_0", "true", "True", "FALSE",
    "yes", "y", "t", "on", "off", "no", "n", "f", "0", "x", "", "1e1", "nan", "inf", [], {}, [1],
]  # fmt: skip


@pytest.mark.parametrize("value", SPELLINGS, ids=repr)
def test_numbers_and_flags_are_read_as_the_engines_models_do(value: Any) -> None:
    """A value that the engine takes is read alike; one that it refuses may be read in any way."""
    from pydantic import TypeAdapter, ValidationError

    raw = msgspec.Raw(json.dumps(value).encode())
    for kind, read in ((int, read_number), (bool, read_flag)):
        try:
            expected: Any = TypeAdapter(kind).validate_json(bytes(raw))
        except ValidationError:
            continue
        assert read(raw) == expected, kind


@pytest.mark.parametrize(
    "salt", ["a", "x" * 128, "x" * 129, "", "a@", "/", "\\", "\0", "ü" * 128, 3, None, [], "\ud800"]
)
def test_salts_are_refused_where_the_engine_refuses_them(salt: Any) -> None:
    from vllm.entrypoints.generate.base.protocol import validate_cache_salt
    from vllm.exceptions import VLLMValidationError

    def refused(check: Any, error: type[Exception]) -> bool:
        try:
            check()
        except error:
            return True
        return False

    raw = json.dumps({"cache_salt": salt}).encode()
    ours = refused(lambda: parse_body(raw, route="chat", session_header=None, session_fields=()), RequestRefused)
    # A lone surrogate is no text for us; the engine would fail on it later.
    assert ours is (refused(lambda: validate_cache_salt(salt), VLLMValidationError) or salt == "\ud800")


@pytest.mark.parametrize("seed", [7, -1, None])
def test_a04_the_samples_seeds_are_those_that_the_engine_gives_its_own(seed: int | None) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request: Any = SimpleNamespace(request_id="r", external_req_id="r", params=SamplingParams(n=3, seed=seed))
    parent = ParentRequest(request)
    expected = [parent.get_child_info(index)[1].seed for index in range(3)]
    body = parse_body(
        json.dumps({"prompt": "a", "n": 3, "seed": seed}).encode(),
        route="completions",
        session_header=None,
        session_fields=(),
    )
    seeds = [json.loads(bytes(one.fields["seed"])) for one in samples(body, limit=3) or []]
    assert [SamplingParams(seed=one).seed for one in seeds] == expected


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("kept", [5, 3, 2])
def test_expert_routing_is_joined_in_the_engines_own_format(dtype: str, kept: int) -> None:
    """Six prompt tokens and three of output: eight rows, however many the decode engine sends."""
    import numpy
    from vllm.utils.serial_utils import numpy2base64

    whole = numpy.arange(8 * 4 * 2, dtype=dtype).reshape(8, 4, 2)
    prompt, output = whole[:6], whole[8 - kept :].copy()
    output[: kept - 2] = 0
    joined = join_experts(numpy2base64(prompt).encode(), numpy2base64(output).encode(), output_tokens=3)
    assert joined is not None
    rows = numpy.load(io.BytesIO(base64.b64decode(joined)))
    assert (rows.dtype, rows.tolist()) == (whole.dtype, whole.tolist())


@pytest.mark.parametrize("usage", [True, False])
def test_the_openai_client_takes_a_labelled_stream(usage: bool) -> None:
    import httpx
    import openai

    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks: list[dict[str, Any]] = [
        head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hi"}}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    if usage:
        chunks.append(head | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
    lines = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)
    reply = StreamMerge(None, label=lambda: b'{"weight_versions":["7"]}').feed(lines + b"data: [DONE]\n\n")
    transport = httpx.MockTransport(
        lambda _request: httpx.Response(200, headers={"content-type": "text/event-stream"}, content=reply)
    )
    http_client: Any = httpx.Client(transport=transport)
    client = openai.OpenAI(api_key="k", base_url="http://router/v1", http_client=http_client)
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "a"}]) as stream:
        events = [event.chunk for event in stream if event.type == "chunk"]
        assert stream.get_final_completion().choices[0].message.content == "hi"
    labels = [event.model_extra["headrace"] for event in events if event.model_extra]
    assert labels == [{"weight_versions": ["7"]}]
    assert (events[-1].usage is not None) is usage
