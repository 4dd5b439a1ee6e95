"""An engine that takes whatever is JSON and answers at once, fast enough for a hundred thousand requests."""

from __future__ import annotations

import json
from typing import Any

from router.io.http1.message import Limits, Request
from router.io.http1.server import HttpServer, Responder

_REPLY = {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": {"prompt_tokens": 1}}
_HEADERS = [("Content-Type", "application/json")]


class PlainEngine:
    """Serves both roles: it hands over where a remote decode is asked for."""

    def __init__(self) -> None:
        self.answered = 0
        limits = Limits(
            max_body_bytes=1 << 26,
            max_header_bytes=1 << 16,
            header_timeout_s=30.0,
            body_timeout_s=30.0,
            idle_timeout_s=60.0,
        )
        self._server = HttpServer(self._serve, limits, lambda _status, _message: None)

    async def start(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{await self._server.start('127.0.0.1', 0)}"

    async def stop(self) -> None:
        await self._server.drain(0.0)

    def _serve(self, request: Request, responder: Responder) -> None:
        self.answered += 1
        status, reply = (200, {}) if request.method == "GET" else _reply_to(request.body)
        responder.reply(status, _HEADERS, json.dumps(reply).encode())


def _reply_to(body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return 400, {"error": {"message": "no JSON", "code": 400}}
    transfer = asked.get("kv_transfer_params") if isinstance(asked, dict) else None
    if isinstance(transfer, dict) and transfer.get("do_remote_decode"):
        return 200, _REPLY | {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]}}
    return 200, _REPLY
