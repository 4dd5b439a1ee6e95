"""What the public port asks about the whole router: readiness, metrics, sessions, which engines there are.

With one process the answers are at hand (`LocalOverview`); with several workers `worker.py` asks the process that holds
the dispatcher.
"""

from __future__ import annotations

from typing import Protocol

from router.core.dispatcher import Dispatcher
from router.io.metrics import Metrics, render
from router.io.serving import Serving


class Overview(Protocol):
    """The questions; see `LocalOverview`."""

    async def not_ready_reason(self) -> str | None: ...

    async def metrics(self) -> bytes: ...

    async def finish_session(self, session_id: str) -> None: ...

    async def abort(self, request_id: str) -> bool: ...

    async def usable_urls(self) -> list[str]: ...


class LocalOverview:
    """Answers from this process."""

    def __init__(self, dispatcher: Dispatcher, serving: Serving, counted: Metrics) -> None:
        self._dispatcher = dispatcher
        self._serving = serving
        self._counted = counted

    async def not_ready_reason(self) -> str | None:
        """Why no new request can be served now; None if one can."""
        return self._dispatcher.not_ready_reason()

    async def metrics(self) -> bytes:
        """The exposition text of all workers together."""
        return render(self._counted.counts(), self._dispatcher)

    async def finish_session(self, session_id: str) -> None:
        self._dispatcher.fleet.finish_session(session_id)

    async def abort(self, request_id: str) -> bool:
        """End the open requests whose clients gave them this id; False if there is none."""
        return (await self._serving.interrupt("asked", request_id)).requests > 0

    async def usable_urls(self) -> list[str]:
        """Engines that may be asked something; none while the gate is frozen."""
        if not self._dispatcher.gate.may_continue:
            return []
        return [member.url for member in self._dispatcher.fleet.members.values() if member.usable]
