"""A reader's connections to producers, kept from one load to the next: to connect takes as long as a GPU to copy a GB.

`transport.py` asks for those of a load. A line on which anything went wrong is not used again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from connectors.weights.bounded import Deadline
from connectors.weights.nixl.client import Channel
from connectors.weights.nixl.messages import Attend, Leave
from connectors.weights.source import FetchError

Address = tuple[str, int]
LEAVE_S = 1.0
"""To write one word: only a connection that is stuck takes longer."""


class Lines:
    """Not for several threads at once; the channels are."""

    def __init__(self) -> None:
        self._kept: dict[Address, Channel] = {}

    def to(self, address: Address, deadline: Deadline) -> Channel:
        """The line to a producer, a new one where it has hung up since. Raises FetchError."""
        kept = self._kept.get(address)
        if kept is not None:
            try:
                kept.check_alive()
            except FetchError:
                self._kept.pop(address).close()
            else:
                return kept
        self._kept[address] = channel = Channel(*address, deadline.left_s())
        return channel

    def attend(self, addresses: Sequence[Address], deadline: Deadline) -> list[Channel]:
        """Have all of these drive NIXL until `leave`. Many slow ones take no longer than one. Raises FetchError where
        one of them does not."""
        try:
            with ExitStack() as asked:
                channels = [self.to(address, deadline) for address in addresses]
                for hear in [asked.enter_context(channel.asked(Attend(), deadline)) for channel in channels]:
                    hear()
        except BaseException:
            # Answers may be on their way that nobody is going to hear, and whoever hangs up is not attended.
            self.close()
            raise
        return channels

    def leave(self, addresses: Sequence[Address]) -> None:
        """End that. Never raises."""
        for address in addresses:
            if address in self._kept:
                try:
                    self._kept[address].tell(Leave(), LEAVE_S)
                except FetchError:
                    self._kept.pop(address).close()

    def keep_only(self, addresses: Collection[Address]) -> None:
        """Hang up on all others."""
        for address in self._kept.keys() - set(addresses):
            self._kept.pop(address).close()

    def close(self) -> None:
        self.keep_only(())
