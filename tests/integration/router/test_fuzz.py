"""Bodies, headers and request lines that no client should send: each is answered, none with a 5xx of our making."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httptools
import pytest
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from router.core.split import FIELDS, SAMPLING_FIELDS
from router.main import RunningRouter, running
from router.settings import EngineEndpoint
from tests.fakes.plain_engine import PlainEngine
from tests.integration.router.harness import TOKEN, make_settings, until

# Hypothesis warns of a long example while it shows one that fails; the warning must not be what is shown.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

INPUTS = 100_000
PER_EXAMPLE = 100
PER_CHUNK = 2_500
CONNECTIONS = 10
GROWTH_MIB = 48
"""Of the whole test process, hypothesis and the stub engines included, once it is warm."""

NAMES = sorted({name for fields in FIELDS.values() for name in fields} | set(SAMPLING_FIELDS))
PATHS = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"]
OTHER_PATHS = ["/tokenize", "/finish_session", "/abort_requests", "/v1/models", "/health", "/", "/v1/x?y=1", "*"]

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["1", "true", "nan", "null", "", "\ud800", "a@b/c\\d\0", "x" * 200]),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
_objects = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), _values, max_size=5)
_nested = st.builds(lambda outer, inner: outer | {"sampling_params": inner}, _objects, _objects)
_json = st.builds(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"), _objects | _nested | _values)
_cut = st.builds(lambda body, share: body[: int(len(body) * share)], _json, st.floats(0, 1))
_spliced = st.builds(
    lambda body, at, noise: body[: at % (len(body) + 1)] + noise + body[at % (len(body) + 1) :],
    _json,
    st.integers(0, 400),
    st.binary(max_size=4),
)
_deep = st.sampled_from([b"[" * 5000, b'{"a":' * 3000, b'{"prompt":' + b"[" * 2000 + b"]" * 2000 + b"}"])
_bodies = st.one_of(_json, _json, _cut, _spliced, st.binary(max_size=40), _deep)
_header_names = st.sampled_from(
    [b"x-session-id", b"x-request-id", b"x-headrace-min-version", b"traceparent", b"Content-Type", b"Expect", b"X-Odd"]
)
_no_line_ends = st.binary(max_size=20).map(lambda raw: raw.translate(None, b"\r\n\0"))
_header_values = st.one_of(_no_line_ends, st.just(b"a" * 300), st.just(b"100-continue"))
_headers = st.lists(st.tuples(_header_names, _header_values), max_size=3)
_methods = st.sampled_from([b"POST"] * 12 + [b"GET", b"PUT", b"OPTIONS", b"BREW", b"post"])
_requests = st.tuples(_methods, st.sampled_from(PATHS * 5 + OTHER_PATHS), _headers, _bodies)


@dataclass
class Answered:
    """One reply as it is read."""

    done: bool = False
    statuses: list[int] = field(default_factory=list)
    body: bytes = b""
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        self.statuses.append(status)
        self.done = status >= 200


async def _answer_to(port: int, raw: bytes) -> tuple[int, bytes] | None:
    """Status and body of the reply; None if the connection was closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        answered = Answered()
        while not answered.done:
            data = await reader.read(65536)
            if not data:
                return None
            answered.parser.feed_data(data)
        return answered.statuses[-1], answered.body
    except ConnectionResetError:
        return None
    finally:
        writer.close()


def _raw(request: tuple[bytes, str, list[tuple[bytes, bytes]], bytes]) -> bytes:
    method, path, headers, body = request
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (
        method, path.encode(), lines, len(body), body,
    )  # fmt: skip


async def _check(port: int, requests: list[bytes]) -> None:
    async def some(first: int) -> None:
        for raw in requests[first::CONNECTIONS]:
            answer = await _answer_to(port, raw)
            if answer is None:
                continue
            status, body = answer
            # 503 is the honest answer to a min-version that nobody has: it waits in line and times out.
            assert status < 500 or (status == 503 and b"min-version" in raw), (status, body[:2000], raw[:2000])

    async with asyncio.timeout(60):
        await asyncio.gather(*(some(first) for first in range(CONNECTIONS)))


@asynccontextmanager
async def _routers() -> AsyncIterator[RunningRouter]:
    async with AsyncExitStack() as stack:
        engines = []
        for role in ("prefill", "decode", "prefill", "decode"):
            engine = PlainEngine()
            url = await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(EngineEndpoint(name=f"{role}-{len(engines)}", role=role, url=url))
        made = await stack.enter_async_context(running(make_settings(engines, max_wait_s=0.05, retries=0), TOKEN))
        made.dispatcher.epochs.commit(1, "v1")
        for name in made.dispatcher.fleet.members:
            made.dispatcher.fleet.confirm(name, 1)
        await until(lambda: all(view.usable for view in made.dispatcher.fleet.views()))
        made.dispatcher.gate.set("open")
        yield made


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _fuzz(inputs: int) -> None:
    chunk = min(inputs, PER_CHUNK)
    chunks = inputs // chunk
    with asyncio.Runner() as runner:
        context = _routers()
        router = runner.run(context.__aenter__())
        try:
            warm_mib = 0.0
            for number in range(chunks):
                _fuzz_chunk(runner, router.port, number, chunk)
                gc.collect()
                if number == chunks // 4:
                    warm_mib = _resident_mib()
            assert _resident_mib() - warm_mib < GROWTH_MIB
            dispatcher = router.dispatcher
            runner.run(until(lambda: dispatcher.waiting == dispatcher.admitted == 0))
            assert all(view.legs_in_flight == view.tokens_in_flight == 0 for view in dispatcher.fleet.views())
        finally:
            runner.run(context.__aexit__(None, None, None))


def _fuzz_chunk(runner: asyncio.Runner, port: int, number: int, inputs: int) -> None:
    """Hypothesis keeps all that it made in one run, so that it repeats none: many inputs are several runs."""
    seen = 0

    @seed(number)
    @hypothesis_settings(
        max_examples=max(2, inputs // PER_EXAMPLE),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(_requests, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def run(requests: list[tuple[bytes, str, list[tuple[bytes, bytes]], bytes]]) -> None:
        nonlocal seen
        runner.run(_check(port, [_raw(each) for each in requests]))
        seen += len(requests)

    run()
    assert seen >= inputs * 0.9


@pytest.mark.timeout(300)
def test_a_few_thousand_odd_requests_are_all_answered() -> None:
    _fuzz(2_000)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_100_000_odd_requests_are_all_answered() -> None:
    _fuzz(INPUTS)
