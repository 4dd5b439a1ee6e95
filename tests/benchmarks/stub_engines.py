"""Engines that cost next to nothing: `python -m tests.benchmarks.stub_engines --role decode --ports 20000 20001`.

`stubs.py` starts them behind both routers. One process serves all replicas of a role, each on its own port. A request
is read to its end, as an engine would, and answered at once: a prefill replica with a handoff, a decode replica with a
small completion. With `--step-s` a decode replica streams: at each step one token to each of its streams, until the
client leaves, as a running batch does. GET /count says how many requests were answered; other GETs get a 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial
from typing import Literal, cast

import httptools
import uvloop

Role = Literal["prefill", "decode"]
USAGE = {
    "prompt_tokens": 500,
    "total_tokens": 501,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 480},
}
"""With details: engines of a job are started with --enable-prompt-tokens-details, and a router has them to merge."""
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "6a0d3c55-9f0e-4bb1-a9b8-5f2f0a4b7f1e",
    "remote_request_id": "cmpl-6a0d3c55",
    "remote_block_ids": [list(range(1000, 1032))],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 500,
}
COMPLETION_TEXT = " stub"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def completion(role: Role) -> dict[str, object]:
    """A reply in vLLM's words."""
    reply: dict[str, object] = {
        "id": "cmpl-6a0d3c55",
        "object": "text_completion",
        "created": 1_790_000_000,
        "model": "stub",
        "choices": [
            {
                "index": 0,
                "text": COMPLETION_TEXT if role == "decode" else " a",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": USAGE,
        "kv_transfer_params": HANDOFF if role == "prefill" else None,
    }
    if role == "prefill":
        reply["metrics"] = {"queue_time_ms": 0.1, "time_to_first_token_ms": 0.1}
    return reply


def token_event() -> bytes:
    """One streamed token, as one chunk of the reply."""
    choice = {"index": 0, "text": COMPLETION_TEXT, "logprobs": None, "finish_reason": None, "stop_reason": None}
    event = completion("decode") | {"choices": [choice], "usage": None}
    del event["kv_transfer_params"]
    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def json_reply(value: object) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Replica:
    """One port: what it answered, and the streams that are open on it."""

    def __init__(self, role: Role) -> None:
        self.answer = json_reply(completion(role))
        self.answered = 0
        self.streams: set[asyncio.WriteTransport] = set()


class EngineConnection(asyncio.Protocol):
    """A router's connection to one replica."""

    def __init__(self, replica: Replica, replicas: list[Replica], *, is_streaming: bool) -> None:
        self._replica = replica
        self._replicas = replicas
        self._is_streaming = is_streaming
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, _error: Exception | None) -> None:
        self._replica.streams.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, target: bytes) -> None:
        self._target = target

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            answered = sum(each.answered for each in self._replicas)
            self._transport.write(json_reply({"answered": answered} if self._target == b"/count" else {}))
            return
        self._replica.answered += 1
        if self._is_streaming:
            self._transport.write(STREAM_HEAD)
            self._replica.streams.add(self._transport)
        else:
            self._transport.write(self._replica.answer)


async def step(replica: Replica, *, start: float, step_s: float) -> None:
    """Send one token to each stream at start, start + step_s, ...; a step that is late is not left out."""
    loop = asyncio.get_running_loop()
    event, due = token_event(), start
    while True:
        await asyncio.sleep(due - loop.time())
        due += step_s
        for stream in replica.streams:
            stream.write(event)


async def serve(role: Role, ports: list[int], step_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    replicas = [Replica(role) for _ in ports]
    for replica, port in zip(replicas, ports, strict=True):
        await loop.create_server(
            partial(EngineConnection, replica, replicas, is_streaming=step_s is not None),
            "127.0.0.1",
            port,
            backlog=4096,
        )
    if step_s is None:
        await asyncio.Event().wait()
        return
    async with asyncio.TaskGroup() as steps:
        for number, replica in enumerate(replicas):
            # Replicas of a fleet don't step together.
            start = loop.time() + number * step_s / len(replicas)
            steps.create_task(step(replica, start=start, step_s=step_s))


def main() -> None:
    parser = argparse.ArgumentParser(description="Stub engines of one role.")
    parser.add_argument("--role", choices=["prefill", "decode"], required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--step-s", type=float, help="stream one token per stream at each step; else answer whole")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.role, arguments.ports, arguments.step_s))


if __name__ == "__main__":
    main()
