"""Between an exchange and its client: passes everything on, and keeps what the client got of a request for an audit.

`public.py` puts it there, for the few requests that `core/finished.py` wants.
"""

from __future__ import annotations

from router.core.events import Arrived
from router.core.finished import KEPT_BYTES, FinishedRequest, FinishedRequests
from router.core.label import Making
from router.io.exchange import Client, Exchange


class Recording:
    """The client of one exchange."""

    def __init__(self, client: Client, request: Arrived, finished: FinishedRequests) -> None:
        self.exchange: Exchange
        """Set before anything is answered."""
        self._client = client
        self._request = request
        self._finished = finished
        self._reply = bytearray()

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self._client.reply(status, headers, body)
        self._over(body if status == 200 and len(body) <= KEPT_BYTES else None)

    def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        self._client.start(status, headers)

    def write(self, data: bytes) -> None:
        self._client.write(data)
        if len(self._reply) < KEPT_BYTES:
            self._reply += data

    def end(self) -> None:
        self._client.end()
        self._over(bytes(self._reply))

    @property
    def writable(self) -> bool:
        return self._client.writable

    def _over(self, reply: bytes | None) -> None:
        if reply is not None:
            self._keep(reply, self.exchange.flow.legs.making)
        # They know each other, and bodies are large.
        del self.exchange

    def _keep(self, reply: bytes, making: Making) -> None:
        """Unless weights changed under it: then no run of today can be what it was."""
        versions = making.versions()
        if len(versions) != 1 or making.kept:
            return
        [(epoch, version)] = versions.items()
        self._finished.add(
            FinishedRequest(
                id=self._request.request_key,
                route=self._request.route,
                body=self._request.body,
                reply=reply,
                epoch=epoch,
                version=version,
                replicas=making.replicas(),
            )
        )
