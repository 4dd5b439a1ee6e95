"""A stream that is cut and continued any number of times says what the uncut one says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.continuable import tracked
from router.core.continuation import CannotContinue, Continuation, Ended, RelayedStream, continue_stream
from router.core.delivered import Delivered
from router.core.split import ClientBody, Route, decode_body, parse_body, prefill_body, read_prefill_reply, single_body
from router.core.stream import StreamMerge
from tests.unit.router.model_engine import PROMPT, ModelEngine

ROUTES: tuple[Route, ...] = ("completions", "chat", "generate")
HANDOFF = b'{"do_remote_prefill":true}'
P_REPLY = read_prefill_reply(b'{"usage":{"prompt_tokens_details":{"cached_tokens":1}},"kv_transfer_params":{"a":1}}')


def client_body(route: Route, **fields: Any) -> ClientBody:
    prompt: dict[Route, dict[str, Any]] = {
        "completions": {"prompt": "say: "},
        "chat": {"messages": [{"role": "user", "content": "say: "}]},
        "generate": {"token_ids": PROMPT, "output_mode": "text"},
    }
    body = prompt[route] | {"stream": True}
    for name in ("return_token_ids", "stream_options"):
        if name in fields:
            body[name] = fields.pop(name)
    body |= {"sampling_params": fields} if route == "generate" else fields
    return parse_body(json.dumps(body).encode(), route=route, session_header=None, session_fields=())


@dataclass
class Client:
    """A request whose stream is cut after so many bytes of each run, and continued."""

    body: ClientBody
    engine: ModelEngine
    cuts: list[int]
    text: bytes = b""
    lost: str | None = None

    def run(self) -> Client:
        delivered = Delivered(self.body, P_REPLY)
        going = Continuation(body=tracked(self.body) or self.body, stream=None, chat_prompt=None)
        for run, cut in enumerate([*self.cuts, None]):
            leg = going.leg_body(decode_body(going.body, HANDOFF, salt="s"))
            source = b"".join(self.engine.stream(json.loads(leg)))
            stream = RelayedStream(StreamMerge(P_REPLY), going.stream, delivered)
            for start in range(0, len(source[:cut]), 97):
                self.text += stream.feed(source[:cut][start : start + 97])
                if stream.broken is not None:
                    self.lost = stream.broken
                    return self
            if cut is None:
                self.text += stream.flush()
                return self
            answer = continue_stream(self.body, delivered, version=f"v{run}")
            if isinstance(answer, Ended):
                self.text += answer.last
                return self
            if isinstance(answer, CannotContinue):
                self.lost = answer.reason
                return self
            going = answer
        return self


def told(text: bytes) -> dict[str, Any]:
    """All that a client reads from a stream."""
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b"[DONE]") == 1
    events = [json.loads(part.removeprefix(b"data: ")) for part in text.split(b"\n\n")[:-2]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    heads = {tuple(event.get(name) for name in ("id", "request_id", "object", "created", "model")) for event in events}
    deltas = [choice.get("delta", {"content": choice.get("text")}) for choice in choices]
    ids = [choice.get("token_ids") for choice in choices]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "heads": len(heads),
        "text": "".join(delta["content"] for delta in deltas),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "token_ids": [one for some in ids if some for one in some],
        "prompts": [p for e in (*events, *choices) if (p := e.get("prompt_token_ids")) is not None],
        "logprobs": {name: [one for some in logprobs for one in some[name]] for name in (logprobs or [{}])[0]},
        "finish": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
        "usage": [event["usage"] for event in events if event.get("usage") and not event["choices"]],
        "running": [event["usage"]["completion_tokens"] for event in events if event.get("usage")][-1:],
    }


def uncut(client: Client) -> dict[str, Any]:
    leg = decode_body(client.body, HANDOFF, salt="s")
    return told(StreamMerge(P_REPLY).feed(b"".join(client.engine.stream(json.loads(leg)))))


@st.composite
def clients(draw: st.DrawFn, groups: st.SearchStrategy[list[int]]) -> Client:
    route = draw(st.sampled_from(ROUTES))
    answer = draw(st.text("ab. é€😀\n", min_size=1, max_size=40)).encode()
    places = sorted(draw(st.sets(st.integers(1, max(1, len(answer) - 1)), max_size=30)))
    pieces = [answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True) if answer[a:b]]
    fields: dict[str, Any] = {}
    options = {
        "stop": st.lists(st.text("ab. é", min_size=1, max_size=4), max_size=3) | st.just("ab"),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.integers(0, 10),
        "max_tokens": st.integers(1, 40),
        "logprobs": st.just(1),
        "return_token_ids": st.booleans(),
        "stream_options": st.sampled_from(
            [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
        ),
    }
    for name, values in options.items():
        if draw(st.booleans()):
            fields[name] = draw(values)
    if route == "completions":
        fields.setdefault("max_tokens", 100)
    engine = ModelEngine(route=route, pieces=pieces, ends=draw(st.booleans()), groups=draw(groups))
    return Client(client_body(route, **fields), engine, draw(st.lists(st.integers(1, 4000), max_size=4)))


@settings(max_examples=60, deadline=None)
@given(clients(st.just([1])))
def test_cut_anywhere_the_client_reads_what_the_uncut_stream_says(client: Client) -> None:
    expected = uncut(client)
    client.run()
    assert client.lost is None
    read = told(client.text)
    assert read == expected


@settings(max_examples=60, deadline=None)
@example(
    Client(
        client_body("completions", stop=["a"], max_tokens=100),
        ModelEngine("completions", [b".", b"\xc3", b"\xa9"], groups=[2]),
        [216],
    )
)
@given(clients(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
def test_with_several_tokens_in_an_event_it_is_the_same_or_ended_with_a_reason(client: Client) -> None:
    """Only a cut inside a character, which nobody can see in such an event, may end the stream."""
    expected = uncut(client)
    client.run()
    if client.lost is None:
        assert told(client.text) == expected
    else:
        assert "inside a character" in client.lost


def cut_after(engine: ModelEngine, body: ClientBody, events: int) -> Delivered:
    """What the client has after so many events of the first run."""
    delivered = Delivered(body, P_REPLY)
    asked = tracked(body)
    assert asked is not None
    for event in engine.stream(json.loads(single_body(asked, salt="s")))[:events]:
        delivered.feed(event)
    return delivered


PIECES = [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("leg", ["prefill", "decode", "colocated"])
def test_every_leg_of_a_continued_chat_carries_its_prompt_beside_the_handoff(leg: str) -> None:
    body = client_body("chat")
    going = continue_stream(body, cut_after(ModelEngine("chat", PIECES), body, 3), version="v1")
    assert isinstance(going, Continuation)
    sent: dict[str, bytes] = {
        "prefill": prefill_body(going.body, salt="s"),
        "decode": decode_body(going.body, HANDOFF, salt="s"),
        "colocated": single_body(going.body, salt="s"),
    }
    params = json.loads(going.leg_body(sent[leg]))["kv_transfer_params"]
    assert params.pop("prompt_token_ids") == [*PROMPT, 100, 101]
    handoff = {"prefill": True, "decode": None, "colocated": None}[leg]
    assert params.get("do_remote_decode") is handoff
    assert params.get("do_remote_prefill") is {"prefill": False, "decode": True, "colocated": None}[leg]


def test_nothing_of_a_chat_that_was_begun_again_gets_through() -> None:
    """Engines before 0.32 pass over the token ids."""
    body = client_body("chat")
    engine = ModelEngine("chat", PIECES)
    going = continue_stream(body, cut_after(engine, body, 3), version="v1")
    assert isinstance(going, Continuation)
    assert going.stream is not None
    again = b"".join(engine.stream(json.loads(single_body(going.body, salt="s"))))
    assert going.stream.feed(again) == b""
    assert going.stream.strayed == "the engine did not take up the answer where it stopped"


def test_an_error_of_the_next_run_reaches_the_client() -> None:
    body = client_body("completions")
    going = continue_stream(body, cut_after(ModelEngine("completions", PIECES), body, 2), version="v1")
    assert isinstance(going, Continuation)
    assert going.stream is not None
    error = b'data: {"error":{"code":500}}\n\n'
    assert going.stream.feed(error) == error


def test_a_client_without_an_event_gets_the_next_run_as_it_is() -> None:
    body = client_body("completions")
    engine = ModelEngine("completions", ["\u00e9".encode()[:1], "\u00e9".encode()[1:]])
    assert continue_stream(body, cut_after(engine, body, 1), version="v1") == Continuation(
        body=tracked(body) or body, stream=None, chat_prompt=None
    )


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_whose_tokens_are_all_delivered_is_only_ended(route: Route) -> None:
    body = client_body(route, stream_options={"include_usage": True})
    engine = ModelEngine(route, PIECES)
    source = engine.stream(json.loads(msgspec.json.encode(body.fields)))
    for left, events in ((2, 2), (1, 1)):
        delivered = cut_after(engine, body, len(source) - left)
        answer = continue_stream(body, delivered, version="v1", label=b'{"epochs":[1]}')
        assert isinstance(answer, Ended)
        *last, done = answer.last.split(b"\n\n")[:-1]
        assert (len(last) + 1, done) == (events, b"data: [DONE]")
        for line in last:
            event = json.loads(line.removeprefix(b"data: "))
            assert event["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            assert event["headrace"] == {"epochs": [1]}
    assert continue_stream(body, cut_after(engine, body, len(source)), version="v1") == Ended(b"")


def test_tokens_up_to_the_cap_are_an_end_by_length() -> None:
    body = client_body("completions", max_tokens=2)
    going = continue_stream(body, cut_after(ModelEngine("completions", PIECES), body, 1), version="v1")
    assert isinstance(going, Continuation)
    delivered = cut_after(ModelEngine("completions", PIECES), client_body("completions"), 2)
    answer = continue_stream(body, delivered, version="v1")
    assert isinstance(answer, Ended)
    event, done = answer.last.split(b"\n\n")[:-1]
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert done == b"data: [DONE]"


def test_generate_says_which_weights_made_which_tokens() -> None:
    body = client_body("generate")
    delivered = cut_after(ModelEngine("generate", PIECES), body, 1)
    shown = b""
    for version, events in (("v1", 1), ("v1", 1), ("v2", 9)):
        going = continue_stream(body, delivered, version=version)
        assert isinstance(going, Continuation)
        assert going.stream is not None
        lines = ModelEngine("generate", PIECES, version="v2").stream(json.loads(single_body(going.body, salt="s")))
        shown = b"".join(delivered.feed(going.stream.feed(line)) for line in lines[:events])
    assert b'"weight_versions":[{"version":"v1","start":0,"end":2},{"version":"v2","start":2,"end":4}]' in shown


def test_a_request_that_can_not_be_carried_over_says_so() -> None:
    body = client_body("completions", n=2)
    assert continue_stream(body, Delivered(body, None), version="v1") == CannotContinue("n can't be carried over")
