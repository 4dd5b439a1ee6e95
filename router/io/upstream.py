"""The router's side towards the engines: legs, probes, and questions whose whole answer is awaited.

`exchange.py` sends legs through it, `poller.py` probes, `public.py` passes requests through. Every request carries the
job's token, which clients never see, and legs name the epoch and the instance that they are meant for: an engine's
fence refuses all others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Self

from router.core.fleet import ReplicaLost
from router.core.table import ProbeFailure
from router.io.http1.client import Failure, HttpClient, Target, split_url
from router.io.leg import Leg
from router.io.sockets import open_socket
from router.settings import RouterSettings

INSTANCE_HEADER = b"x-headrace-instance"


@dataclass(frozen=True, kw_only=True)
class EngineReply:
    """A whole reply of an engine."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def instance(self) -> str:
        """Which life of the engine answered; empty without a fence."""
        return self.headers.get(INSTANCE_HEADER, b"").decode("latin-1")


class _Question:
    """A call whose whole reply someone awaits."""

    __slots__ = ("_answer", "_headers", "_parts", "_status")

    def __init__(self, answer: asyncio.Future[EngineReply | Failure]) -> None:
        self._answer = answer
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers

    def data(self, chunk: bytes) -> None:
        self._parts.append(chunk)

    def ended(self) -> None:
        if not self._answer.done():
            body = b"".join(self._parts)
            self._answer.set_result(EngineReply(status=self._status, headers=self._headers, body=body))

    def failed(self, failure: Failure, _detail: str) -> None:
        if not self._answer.done():
            self._answer.set_result(failure)


class Upstream:
    """See the module text."""

    def __init__(self, settings: RouterSettings, token: str) -> None:
        self._client = HttpClient(
            keepalive_s=settings.keepalive_s, connect_timeout_s=settings.connect_timeout_s, open_socket=open_socket
        )
        # A compressed stream could not be relayed event by event.
        self._common = f"Authorization: Bearer {token}\r\nAccept-Encoding: identity\r\n".encode("ascii")
        self._heads: dict[tuple[str, int], bytes] = {}
        self._targets: dict[tuple[str, str], Target] = {}
        self._alive: defaultdict[str, dict[Leg, None]] = defaultdict(dict)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    # -- legs ----------------------------------------------------------------------------------------------

    def send(self, leg: Leg, forwarded: bytes) -> None:
        """Send a leg; what becomes of it is told to the leg."""
        command = leg.command
        self._alive[command.replica][leg] = None
        shared = self._heads.get((command.instance, command.epoch)) or self._make_head(command.instance, command.epoch)
        head = b"%bX-Request-Id: %b\r\n%b" % (shared, command.request_id.encode("ascii"), forwarded)
        target = self._targets.get((command.url, command.path)) or self._make_target(command.url, command.path)
        leg.call = self._client.send(target, "POST", head, command.body, leg, send_by=command.send_by)

    def forget(self, leg: Leg) -> None:
        """The leg is over."""
        self._alive[leg.command.replica].pop(leg, None)

    def legs(self) -> list[Leg]:
        """All legs that are not over."""
        return [leg for legs in self._alive.values() for leg in legs]

    def end_legs(self, lost: ReplicaLost) -> None:
        """End the legs that a lost replica holds; their flows go on at once."""
        for leg in tuple(self._alive[lost.replica]):
            if leg.command.instance == lost.instance or not leg.command.instance:
                leg.lose(silent=lost.silent)

    # -- questions -----------------------------------------------------------------------------------------

    async def ask(
        self, method: str, url: str, path: str, timeout_s: float, *, body: bytes = b""
    ) -> EngineReply | Failure | None:
        """A whole reply, how there came none, or None if there was none in time."""
        answer: asyncio.Future[EngineReply | Failure] = asyncio.get_running_loop().create_future()
        head = self._common + (b"Content-Type: application/json\r\n" if body else b"")
        # Not `_target`: what a client puts behind the `?` is kept nowhere.
        target = replace(split_url(url), path=path.encode("ascii"))
        call = self._client.send(target, method, head, body, _Question(answer))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            if not answer.done() or answer.cancelled():
                call.close()

    async def probe(self, url: str, timeout_s: float) -> EngineReply | ProbeFailure:
        """The reply if `GET url/health` answers 200 in time, else how it failed."""
        reply = await self.ask("GET", url, "/health", timeout_s)
        if reply is None or reply == "local":
            return "slow"
        return reply if isinstance(reply, EngineReply) and reply.status == 200 else "refused"

    # -- inside --------------------------------------------------------------------------------------------

    def _make_head(self, instance: str, epoch: int) -> bytes:
        """The header lines that all legs to one life of an engine share."""
        if len(self._heads) > 4096:
            self._heads.clear()
        lines = [f"x-headrace-epoch: {epoch}\r\nx-headrace-salted: 1\r\nContent-Type: application/json\r\n"]
        if instance:
            lines.append(f"x-headrace-instance: {instance}\r\n")
        head = self._heads[instance, epoch] = self._common + "".join(lines).encode("ascii")
        return head

    def _make_target(self, url: str, path: str) -> Target:
        if len(self._targets) > 65536:
            self._targets.clear()
        target = self._targets[url, path] = split_url(url + path)
        return target
