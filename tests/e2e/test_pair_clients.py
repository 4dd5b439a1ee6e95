"""The programs that people point at an OpenAI address, pointed at a job's router: the official `openai` client, and
vLLM's serving benchmark.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AsyncStream, BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam, ChatCompletionStreamOptionsParam

from tests.e2e.conversations import TOLERANCE
from tests.e2e.harness import (
    CALL_TIMEOUT_S,
    UP_TIMEOUT_S,
    metric,
    router_state,
    set_gate,
    wait_until,
)
from tests.e2e.leftovers import wait_for_nothing_held

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

MODEL = "tiny"
PROMPT = "the quick brown fox jumps over the lazy dog " * 3
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
COMPLETION = 12
LONG = 800
"""Tokens of a reply that nobody waits for to its end."""
BODY = {"ignore_eos": True}
"""What is asked beside the client's own arguments."""
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": COMPLETION, "temperature": 0, "extra_body": BODY}
TWO: dict[str, Any] = {**GREEDY, "n": 2, "temperature": 1, "seed": 7}
LAST_USAGE: ChatCompletionStreamOptionsParam = {"include_usage": True}

BENCHMARK = """
import json
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

for arguments in json.load(sys.stdin):
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(arguments))
"""
"""`vllm bench serve` where the console script can't start, once per list of arguments: loading it takes longest."""
BENCHMARK_ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Endpoint by backend."""
BENCHMARK_PROMPTS = 12
BENCHMARK_INPUT = 100
BENCHMARK_OUTPUT = 8


@pytest.fixture(scope="module")
def base_url(pair: dict[str, Any]) -> str:
    return f"{pair['router']['url']}/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="not-needed", timeout=CALL_TIMEOUT_S, max_retries=0) as made:
        yield made


def async_client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="not-needed", timeout=CALL_TIMEOUT_S, max_retries=0)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_completion_whole_and_streamed(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == COMPLETION
    assert whole.usage.prompt_tokens == len(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == COMPLETION
    stream = client.completions.create(prompt=PROMPT, logprobs=2, stream=True, stream_options=LAST_USAGE, **GREEDY)
    events = list(stream)
    assert "".join(each.text for event in events for each in event.choices) == choice.text
    parts = [each.logprobs for event in events for each in event.choices if each.logprobs]
    scores = [score for part in parts for score in part.token_logprobs or []]
    assert scores == pytest.approx(choice.logprobs.token_logprobs, abs=TOLERANCE)
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == COMPLETION
    assert all(event.usage is None for event in events[:-1])


def test_chat_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * COMPLETION
    with client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=LAST_USAGE, **GREEDY) as stream:
        events = list(stream)
    text = "".join(each.delta.content or "" for event in events for each in event.choices)
    assert text == choice.message.content
    assert [each.finish_reason for event in events for each in event.choices][-1] == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == COMPLETION


def test_two_samples(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **TWO)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].text != whole.choices[1].text
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 2 * COMPLETION)
    texts = {0: "", 1: ""}
    for event in client.completions.create(prompt=PROMPT, stream=True, **TWO):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    chat = client.chat.completions.create(messages=MESSAGES, **TWO)
    assert [(choice.index, choice.finish_reason) for choice in chat.choices] == [(0, "length"), (1, "length")]


def test_many_at_once_with_the_async_client(base_url: str, client: OpenAI) -> None:
    alone = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text

    async def streamed(http: AsyncOpenAI) -> str:
        stream = await http.completions.create(prompt=PROMPT, stream=True, **GREEDY)
        return "".join([choice.text async for event in stream for choice in event.choices])

    async def whole(http: AsyncOpenAI) -> str:
        reply = await http.completions.create(prompt=PROMPT, **GREEDY)
        return str(reply.choices[0].text)

    async def chat(http: AsyncOpenAI) -> int:
        reply = await http.chat.completions.create(messages=MESSAGES, **GREEDY)
        return reply.usage.completion_tokens if reply.usage is not None else 0

    async def all_at_once() -> list[Any]:
        async with async_client(base_url) as http:
            assert [model.id async for model in http.models.list()] == [MODEL]
            return await asyncio.gather(*(ask(http) for ask in (streamed, whole, chat) for _ in range(4)))

    assert asyncio.run(all_at_once()) == [alone] * 8 + [COMPLETION] * 4


def test_a_closed_stream_ends_at_the_engine(client: OpenAI, pair: dict[str, Any]) -> None:
    with client.completions.create(prompt=PROMPT, stream=True, **{**GREEDY, "max_tokens": LONG}) as stream:
        seen = [next(stream) for _ in range(3)]
    assert len(seen) == 3
    wait_for_nothing_held(pair)


def test_cancelled_tasks_end_at_the_engine(base_url: str, pair: dict[str, Any]) -> None:
    """In the middle of a stream, and while waiting for a whole reply."""

    long: Any = {**GREEDY, "max_tokens": LONG}

    async def read_on(stream: AsyncStream[ChatCompletionChunk]) -> None:
        async for _ in stream:
            pass

    async def cancel_both() -> None:
        async with async_client(base_url) as http:
            waiting = asyncio.create_task(http.completions.create(prompt=PROMPT, **long))
            stream = await http.chat.completions.create(messages=MESSAGES, stream=True, **long)
            reading = asyncio.create_task(read_on(stream))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert not reading.done()
            for task in (waiting, reading):
                task.cancel()
            ended = await asyncio.gather(waiting, reading, return_exceptions=True)
            assert [type(each) for each in ended] == [asyncio.CancelledError] * 2

    asyncio.run(cancel_both())
    wait_for_nothing_held(pair)


def test_mistakes_are_told_as_such(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="maximum context length"):
        client.completions.create(prompt="a" * 2000, **GREEDY)
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(prompt=PROMPT, **{**GREEDY, "extra_body": {"kv_transfer_params": {}}})
    assert (refused.value.param, refused.value.type) == ("kv_transfer_params", "BadRequestError")
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(messages=MESSAGES, **{**TWO, "n": 200})
    assert refused.value.param == "n"
    with pytest.raises(NotFoundError):
        client.completions.create(prompt=PROMPT, **{**GREEDY, "model": "another"})
    with pytest.raises(NotFoundError, match="no route POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input=PROMPT)


def test_the_client_comes_back_after_a_503(client: OpenAI, pair: dict[str, Any]) -> None:
    def refusals() -> float:
        return metric(f"{pair['router']['url']}/metrics", "headrace_router_requests_total", code="503")

    set_gate(pair, "holding")
    try:
        with pytest.raises(InternalServerError) as refused:
            client.completions.create(prompt=PROMPT, **GREEDY)
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")
        before = refusals()
        with ThreadPoolExecutor() as threads:
            patient = client.with_options(max_retries=20)
            reply = threads.submit(lambda: patient.completions.create(prompt=PROMPT, **GREEDY))
            wait_until("the router has refused it", lambda: refusals() > before)
            set_gate(pair, "open")
            assert reply.result().choices[0].finish_reason == "length"
    finally:
        set_gate(pair, "open")


def test_headers_of_a_raw_reply(client: OpenAI) -> None:
    asked = {"x-request-id": "my-own-id"}
    raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, extra_headers=asked, **GREEDY)
    made_by = {name: raw.headers[f"x-headrace-{name}"] for name in ("prefill", "decode", "epoch", "weight-version")}
    assert made_by == {"prefill": "prefill-0", "decode": "decode-0", "epoch": "1", "weight-version": "initial"}
    assert raw.headers["x-headrace-single-version"] == "true"
    assert raw.request_id == "my-own-id"
    assert raw.parse().choices[0].finish_reason == "length"
    with client.completions.with_streaming_response.create(prompt=PROMPT, **GREEDY) as unnamed:
        assert unnamed.headers["x-request-id"]
        assert unnamed.headers["x-headrace-epoch"] == "1"
        unnamed.read()


def test_what_only_extra_body_can_ask(client: OpenAI) -> None:
    label = {
        "prefill": "prefill-0",
        "decode": "decode-0",
        "epochs": [1],
        "weight_versions": ["initial"],
        "single_version": True,
        "attempts": 1,
    }
    asked = {**GREEDY, "extra_body": {**BODY, "return_headrace": True, "return_token_ids": True}}
    whole = client.completions.create(prompt=[5, 6, 7] * 20, **asked)
    assert whole.model_extra is not None
    assert whole.model_extra["headrace"] == label
    choice = whole.choices[0].model_extra or {}
    assert choice["prompt_token_ids"] == [5, 6, 7] * 20
    assert len(choice["token_ids"]) == COMPLETION
    events = list(client.completions.create(prompt=[5, 6, 7] * 20, stream=True, **asked))
    extras = [event.model_extra or {} for event in events]
    assert [each["headrace"] for each in extras if "headrace" in each] == [label]
    streamed = [each.model_extra or {} for event in events for each in event.choices]
    assert [token for each in streamed for token in each.get("token_ids") or []] == choice["token_ids"]


def test_a_session_by_header_or_body(client: OpenAI, pair: dict[str, Any]) -> None:
    before = router_state(pair)["sessions"]
    reasons = []
    for named in ({"extra_headers": {"x-session-id": "talk"}}, {"extra_body": {"session_id": "talk"}}):
        raw = client.completions.with_raw_response.create(prompt=PROMPT, **{**GREEDY, **named})
        reasons.append(raw.headers["x-headrace-choice"])
    assert reasons == ["prefill=new, decode=new", "prefill=pinned, decode=pinned"]
    assert router_state(pair)["sessions"] == before + 1
    url = f"{pair['router']['url']}/finish_session"
    httpx.post(url, json={"session_id": "talk"}, timeout=30, trust_env=False).raise_for_status()
    assert router_state(pair)["sessions"] == before


@pytest.mark.full
def test_vllms_serving_benchmark(pair: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    runs = [
        [
            *("--backend", backend, "--endpoint", endpoint, "--base-url", pair["router"]["url"], "--model", MODEL),
            *("--tokenizer", str(tiny_model), "--dataset-name", "random", "--num-prompts", str(BENCHMARK_PROMPTS)),
            *("--random-input-len", str(BENCHMARK_INPUT), "--random-output-len", str(BENCHMARK_OUTPUT)),
            *("--ignore-eos", "--save-result", "--result-filename", str(tmp_path / backend)),
        ]
        for backend, endpoint in BENCHMARK_ROUTES.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", BENCHMARK],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=UP_TIMEOUT_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for backend in BENCHMARK_ROUTES:
        result = json.loads((tmp_path / backend).read_text(encoding="utf-8"))
        assert (result["completed"], result["failed"]) == (BENCHMARK_PROMPTS, 0)
        assert result["total_output_tokens"] == BENCHMARK_PROMPTS * BENCHMARK_OUTPUT
    wait_for_nothing_held(pair)
