"""What a rank has in host memory for `cpu_prefetch`, between its commands: a copy, and a version on its way into it.

`rank.py` owns one; `host_copy.py` has the copy and the thread that fills it.
"""

from __future__ import annotations

from contextlib import suppress

from connectors.vllm_plugin.weights.host_copy import CopiedFetch, HostCopy, Prefetch
from connectors.vllm_plugin.weights.planner import Planner
from connectors.vllm_plugin.weights.settings import WeightSettings
from connectors.vllm_plugin.weights.verdict import RankReport, WeightCommand
from connectors.weights.source import Fetch, FetchError, Transport

GIVE_UP_S = 15.0
"""For a thread that was told to stop: it ends with the step that it is in."""


class StillReading(FetchError):
    """A prefetch or a read that was given up may still write."""


class Prefetching:
    """One copy at a time."""

    def __init__(self, planner: Planner, settings: WeightSettings) -> None:
        self._planner = planner
        self._settings = settings
        self._copy: HostCopy | None = None
        self._prefetch: Prefetch | None = None
        self.is_misfit = False
        """Whether a version came that the copy has no room for."""

    def start(self, command: WeightCommand, transport: Transport) -> None:
        """Begin to fetch; returns at once. Raises StillReading."""
        self.give_up()
        self._prefetch = Prefetch(
            command.source,
            lambda: transport.open(command.source, self._planner.groups, timeout_s=command.timeout_s),
            self._room_for,
            settings=self._settings,
            check_finite=command.check_finite,
            limit_s=command.limit_s,
        )

    def has(self, command: WeightCommand) -> bool:
        """Whether what the command loads is there or on its way."""
        return self._prefetch is not None and self._prefetch.source == command.source and not self._prefetch.failed

    def fetch(self, limit_s: float) -> Fetch:
        """The version that was started, once it is whole. Raises FetchError where it does not become so."""
        assert self._prefetch is not None
        return CopiedFetch(self._prefetch.wait(limit_s))

    def done(self) -> None:
        """What was fetched is not needed any more."""
        self._prefetch = None
        if not self._settings.keep_copy:
            self.drop_copy()

    def copy_of(self, version: str) -> HostCopy | None:
        """The copy, where it is whole and of this version."""
        return self._copy if self._copy is not None and self._copy.version == version else None

    def give_up(self) -> None:
        """Forget what is on its way. Raises StillReading."""
        if self._prefetch is None:
            return
        self._prefetch.cancel()
        with suppress(FetchError):
            self._prefetch.wait(GIVE_UP_S)
        if self._prefetch.running:
            raise StillReading("a prefetch that was given up is still reading: try again later")
        self.done()

    def drop_copy(self) -> None:
        """Free it. No transport may have its memory registered any more, where copies are kept."""
        self.is_misfit = False
        if self._copy is not None:
            self._copy.release()
            self._copy = None

    def describe(self, report: RankReport) -> None:
        prefetch = self._prefetch
        report.phase, report.prefetched = "idle", None
        if prefetch is None:
            return
        if prefetch.running:
            report.phase = "prefetching"
        elif prefetch.failed:
            report.error = report.error or f"prefetch of {prefetch.source['version']}: {prefetch.failed}"
        else:
            report.phase, report.prefetched = "prefetched", prefetch.source["version"]

    def _room_for(self, fetch: Fetch) -> HostCopy:
        """On the prefetching thread, inside a transport: nothing can be freed here that a transport may have
        registered."""
        pieces = self._planner.plan.pieces
        if self._copy is None:
            self._copy = HostCopy(pieces, fetch.manifest, is_kept=self._settings.keep_copy)
        elif not self._copy.fits(pieces, fetch.manifest):
            self.is_misfit = True
            raise FetchError("the tensors are others than those before, for which there is room")
        return self._copy
