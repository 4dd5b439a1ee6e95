from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.errors import RequestRefused
from router.core.fanout import SampleStream, merge_samples, samples, samples_per_prompt
from router.core.split import ClientBody, Route, check_split, parse_body, prefill_body

DONE = b"data: [DONE]\n\n"


def parse(body: Any, route: Route = "completions") -> ClientBody:
    return parse_body(json.dumps(body).encode(), route=route, session_header="s", session_fields=("session_id",))


def taken_apart(body: Any, route: Route = "completions", limit: int = 100) -> list[Any] | None:
    """The samples' decode legs; every sample can be split."""
    bodies = samples(parse(body, route), limit=limit)
    if bodies is None:
        return None
    for one in bodies:
        check_split(one)
        assert one.session_id == "s"
    return [{name: json.loads(bytes(value)) for name, value in one.fields.items()} for one in bodies]


def event(fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def events(stream: bytes) -> list[Any]:
    assert stream.endswith(b"\n\n")
    texts = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    return ["[DONE]" if text == b"[DONE]" else json.loads(text) for text in texts]


# -- one body per sample --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [{"prompt": "a"}, {"prompt": ["a"], "n": 1}, {"prompt": [1, 2]}, {"prompt": [[1, 2]]}, {"prompt": "a", "n": "1"},
     {"prompt": "a", "n": 0}, {"prompt": "a", "n": None}, {"prompt": "a", "n": "many"}, {}],
)  # fmt: skip
def test_one_sample_of_one_prompt_is_left_alone(body: Any) -> None:
    assert samples(parse(body), limit=1) is None


def test_a04_each_sample_has_its_own_body_and_seed() -> None:
    body = {"messages": [], "n": 4, "seed": 7, "stream": True, "stream_options": {"include_usage": True}, "x": [1.50]}
    assert taken_apart(body, "chat") == [body | {"n": 1, "seed": 7 + sample} for sample in range(4)]
    [first, *_] = samples(parse(body, "chat"), limit=4) or []
    assert json.loads(prefill_body(first, salt="s"))["n"] == 1


def test_the_label_is_of_the_whole_reply() -> None:
    assert taken_apart({"prompt": "a", "n": 2, "return_headrace": True}) == [{"prompt": "a", "n": 1}] * 2


@pytest.mark.parametrize("seed", [None, -1, "x"])
def test_a_seed_that_is_none_stays(seed: Any) -> None:
    assert taken_apart({"prompt": "a", "n": 2, "seed": seed}) == [{"prompt": "a", "n": 1, "seed": seed}] * 2
    assert taken_apart({"prompt": "a", "n": "2.0"}) == [{"prompt": "a", "n": 1}] * 2


def test_a04_samples_of_several_prompts_come_in_the_engines_order() -> None:
    bodies = taken_apart({"prompt": ["a", "b"], "n": 2, "seed": 5})
    assert bodies == [{"prompt": prompt, "n": 1, "seed": seed} for prompt in "ab" for seed in (5, 6)]
    assert taken_apart({"prompt": [[1, 2], [3]]}) == [{"prompt": [1, 2]}, {"prompt": [3]}]


def test_a04_on_the_generate_route_samples_are_asked_for_one_level_deeper() -> None:
    body = {"token_ids": [1], "sampling_params": {"n": 2, "seed": 1, "x": 1}, "prompt": ["no", "field"]}
    assert taken_apart(body, "generate") == [
        body | {"sampling_params": {"n": 1, "seed": seed, "x": 1}} for seed in (1, 2)
    ]
    assert samples_per_prompt(parse(body, "generate")) == 2
    assert samples(parse(body | {"n": 2, "sampling_params": {}}, "generate"), limit=1) is None


def test_the_prompt_is_scored_once() -> None:
    bodies = taken_apart({"prompt": ["a", "b"], "n": 2, "prompt_logprobs": 1})
    assert bodies is not None
    assert [one.get("prompt_logprobs") for one in bodies] == [1, None, 1, None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 5}, "n"),
        ({"prompt": ["a", "b"], "n": 3}, "n"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": "a", "n": 10**30}, "n"),
    ],
)
def test_more_samples_than_the_limit_are_refused(body: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        samples(parse(body), limit=4)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["best_of", "use_beam_search"])
def test_what_a_handoff_can_not_serve_stays_refused(name: str) -> None:
    bodies = samples(parse({"prompt": "a", "n": 2, name: 2 if name == "best_of" else True}), limit=4)
    assert bodies is not None
    with pytest.raises(RequestRefused) as caught:
        check_split(bodies[0])
    assert caught.value.param == name


# -- one whole reply ------------------------------------------------------------------------------------


def reply(text: str, *, prompt: int, cached: int, output: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"of-{text}",
        "choices": [{"index": 0, "text": text}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached, "multimodal_tokens": {"image": 2}},
            "completion_tokens_details": {"reasoning_tokens": output - 1},
        },
        **fields,
    }


def merge(replies: list[dict[str, Any]], per_prompt: int, label: bytes | None = None) -> Any:
    merged = merge_samples([json.dumps(one).encode() for one in replies], per_prompt=per_prompt, label=label)
    return json.loads(merged) if merged is not None else None


def test_a04_prompt_tokens_count_once_and_completion_tokens_in_sum() -> None:
    replies = [reply(text, prompt=10, cached=cached, output=3) for text, cached in (("a", 4), ("b", 9), ("c", 9))]
    assert merge(replies, 3) == {
        "id": "of-a",
        "choices": [{"index": index, "text": text} for index, text in enumerate("abc")],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 9,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 4, "multimodal_tokens": {"image": 2}},
            "completion_tokens_details": {"reasoning_tokens": 6},
        },
    }


def test_a04_of_several_prompts_each_counts_once() -> None:
    replies = [
        reply(text, prompt=prompt, cached=prompt - 1, output=2)
        for text, prompt in zip("abcd", [5, 5, 7, 7], strict=True)
    ]
    usage = merge(replies, 2)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 8, 20)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 10


def test_the_prompts_scores_are_the_first_samples() -> None:
    def scored(scores: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "prompt_logprobs": scores}], "prompt_logprobs": scores, "metrics": {"x": 1}}

    merged = merge([scored([1]), scored(None), scored([2]), scored(None)], 2)
    assert [choice["prompt_logprobs"] for choice in merged["choices"]] == [[1], [1], [2], [2]]
    assert (merged["prompt_logprobs"], merged["metrics"]) == ([1], None)


def test_a_reply_without_usage_gets_none_and_the_label_is_added() -> None:
    assert merge([{"choices": [{}]}, {"choices": [{}]}], 2, b"[1]") == {
        "choices": [{"index": 0}, {"index": 1}],
        "headrace": [1],
    }


@pytest.mark.parametrize("bad", [b"oops", b"{}", b'{"choices": []}', b'{"choices": [{}, {}]}', b'{"choices": [3]}'])
def test_what_is_no_reply_of_one_sample_is_not_merged(bad: bytes) -> None:
    assert merge_samples([b'{"choices": [{}]}', bad], per_prompt=2) is None


# -- one stream -----------------------------------------------------------------------------------------


def chunk(sample: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"of-{sample}", "created": ord(sample), "choices": [{"index": 0, "text": text}], **fields}


def usage_chunk(sample: str, prompt: int, output: int) -> dict[str, Any]:
    usage = reply("", prompt=prompt, cached=prompt - 1, output=output)["usage"]
    return {"id": f"of-{sample}", "choices": [], "usage": usage, "metrics": {"queue_time_ms": 1}}


def test_a04_events_carry_their_index_and_one_id() -> None:
    stream = SampleStream(2, route="completions", per_prompt=2)
    out = stream.feed(1, event(chunk("b", "x")))
    out += stream.feed(0, event(chunk("a", "y", invented=[1])) + event(usage_chunk("a", 10, 3)) + DONE)
    assert b"[DONE]" not in out
    out += stream.feed(1, event(chunk("b", "z")) + event(usage_chunk("b", 10, 4)) + DONE)
    first, second, third, usage, done = events(out)
    assert first == {"id": "of-b", "created": 98, "choices": [{"index": 1, "text": "x"}]}
    assert second == {"id": "of-b", "created": 98, "choices": [{"index": 0, "text": "y"}], "invented": [1]}
    assert third == {"id": "of-b", "created": 98, "choices": [{"index": 1, "text": "z"}]}
    assert (usage["id"], usage["choices"], "metrics" in usage, done) == ("of-b", [], False, "[DONE]")
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (10, 7)
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 9


def test_without_usage_there_is_no_usage_event_and_usage_along_the_way_passes() -> None:
    stream = SampleStream(2, route="chat", per_prompt=1)
    along = chunk("a", "x", usage={"prompt_tokens": 5, "completion_tokens": 1})
    out = stream.feed(0, event(along) + DONE) + stream.feed(1, b": ping\n\n" + event(chunk("b", "y")) + DONE)
    assert b": ping\n" in out
    passed, other, done = events(out.replace(b": ping\n", b""))
    assert (passed["usage"], other["choices"][0]["index"], done) == (along["usage"], 1, "[DONE]")


def test_on_the_generate_route_the_prompts_ids_are_told_once() -> None:
    stream = SampleStream(2, route="generate", per_prompt=2)
    told = {"request_id": "r", "choices": [{"index": 0, "token_ids": [1]}], "prompt_token_ids": [5, 6]}
    first, second = events(stream.feed(0, event(told)) + stream.feed(1, event(told)))
    assert (first["prompt_token_ids"], "prompt_token_ids" in second) == ([5, 6], False)


@pytest.mark.parametrize("usage", [True, False])
def test_the_label_stands_in_the_last_event(usage: bool) -> None:
    stream = SampleStream(1, route="chat", per_prompt=1, label=lambda: b'["v"]')
    last = event(usage_chunk("a", 2, 2)) if usage else b""
    *_, labelled, done = events(stream.feed(0, event(chunk("a", "x")) + last + DONE))
    assert (labelled["headrace"], labelled["id"], labelled["choices"], done) == (["v"], "of-a", [], "[DONE]")


def test_an_engines_error_passes_as_it_is_and_a_stream_that_broke_can_be_ended() -> None:
    stream = SampleStream(2, route="chat", per_prompt=2)
    error = event({"error": {"message": "x", "code": 500}})
    assert stream.feed(0, error) == error
    assert stream.feed(0, b"data: not json\n\n") == b"data: not json\n\n"
    assert (stream.end(0), stream.end(0)) == (b"", b"")
    assert stream.end(1) == DONE
    assert stream.end(1) == b""
