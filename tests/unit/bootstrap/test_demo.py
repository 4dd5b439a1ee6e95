import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.local import demo
from deploy.local.demo import DemoError

ROUTER = "http://router"
STATUS: demo.Json = {
    "model": "smollm2",
    "router": {"url": ROUTER},
    "engines": [{"role": "decode", "url": "http://decode"}, {"role": "prefill", "url": "http://prefill"}],
    "pool": {"metrics_url": "http://master/metrics", "capacity_bytes": 2**28},
}


def stream(*events: object) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def answer(text: str, *, prompt: int, cached: int) -> httpx.Response:
    usage = {"prompt_tokens": prompt, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
    pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in text]
    return stream({"choices": [{"delta": {"role": "assistant"}}]}, *pieces, {"choices": [], "usage": usage})


class Fleet:
    """A job that answers from memory."""

    def __init__(self, *, hits: int, cached: int) -> None:
        self.hits, self.cached = hits, cached
        self.bodies: list[demo.Json] = []
        self.resets = iter([False, True])

    def __call__(self, request: httpx.Request) -> httpx.Response:
        token = request.headers.get("authorization")
        assert token == ("Bearer secret" if request.url.host == "prefill" else None)
        if request.url.path == "/v1/chat/completions":
            self.bodies.append(json.loads(request.content))
            turn = len(self.bodies)
            return answer("Po", prompt=40 * turn, cached=self.cached if turn == 2 else 0)
        if request.url.path == "/reset_prefix_cache":
            return httpx.Response(200, json={"success": next(self.resets)})
        if request.url.host == "master":
            return httpx.Response(200, text="master_key_count 3\nmaster_allocated_bytes 1048576\n")
        hits = self.hits if len(self.bodies) == 2 else 0
        return httpx.Response(200, text=f'{demo.HITS}{{engine="0"}} {hits}\n')


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(demo.time, "sleep", sleep)
    monkeypatch.setattr(demo.time, "monotonic", lambda: now)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, fake_time: None, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(hits=64, cached=64)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setitem(STATUS, "directory", str(tmp_path))
    real = httpx.Client
    monkeypatch.setattr(demo.httpx, "Client", lambda **options: real(transport=httpx.MockTransport(fleet), **options))
    return fleet


def test_turn_two_carries_turn_one_and_the_pool_is_shown(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    demo.converse(STATUS)
    first, second = (body["messages"] for body in fleet.bodies)
    assert second == [*first, {"role": "assistant", "content": "Po"}, {"role": "user", "content": demo.TURNS[1]}]
    shown = capsys.readouterr().out
    assert "turn 2 took 64 of the 80 prompt tokens" in shown
    assert "0 -> 64" in shown
    assert "3 blocks before turn 2; 1.0 of 256 MiB" in shown


@pytest.mark.parametrize(("hits", "cached", "said"), [(0, 0, "gave nothing"), (64, 32, "disagree")])
def test_a_pool_that_did_not_help_fails_the_demo(fleet: Fleet, hits: int, cached: int, said: str) -> None:
    fleet.hits, fleet.cached = hits, cached
    with pytest.raises(DemoError, match=said):
        demo.converse(STATUS)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (httpx.Response(503, text="no engine"), "the router answered 503: no engine"),
        (stream({"error": {"message": "engine died"}}), "the answer broke off: .*engine died"),
        (stream({"choices": [{"delta": {"content": "Po"}}]}), "broke off before its end"),
    ],
)
def test_a_broken_answer_fails_the_demo(fake_time: None, reply: httpx.Response, said: str) -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda request: reply))
    with pytest.raises(DemoError, match=said):
        demo.ask(client, ROUTER, "smollm2", [{"role": "user", "content": "Hello"}])


def test_a_cache_that_stays_held_ends_the_wait(fake_time: None) -> None:
    reply = httpx.Response(200, json={"success": False})
    client = httpx.Client(transport=httpx.MockTransport(lambda request: reply))
    with pytest.raises(DemoError, match="did not clear its cache"):
        demo.clear_local_cache(client, "http://prefill")


def test_a_running_job_is_not_touched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo, "job_status", lambda: {**STATUS, "phase": "ready"})
    monkeypatch.setattr(demo, "headrace", lambda *arguments: pytest.fail(f"ran {arguments}"))
    assert demo.main() == 1
    assert "headrace down demo" in capsys.readouterr().out


def test_a_failed_conversation_stops_the_job_and_names_the_logs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.hits = fleet.cached = 0
    ran: list[tuple[str, ...]] = []

    def headrace(*arguments: str) -> int:
        ran.append(arguments)
        return 0

    unit = {"name": "decode-0", "state": "dead", "log": "/jobs/demo/logs/decode-0.log"}
    up = {**STATUS, "phase": "ready", "units": [unit]}
    told = iter([None, up, up, up])
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo, "job_status", lambda: next(told))
    monkeypatch.setattr(demo, "headrace", headrace)
    assert demo.main() == 1
    assert ran == [("up", demo.JOB_FILE), ("down", "demo")]
    assert "decode-0 is not running: /jobs/demo/logs/decode-0.log" in capsys.readouterr().out
