"""A session's key decides its replica, so that routers without common memory agree.

Rendezvous hashing: the replica with the highest hash of (key, replica) wins. When one comes or goes only the sessions
that it wins or held move. A choice looks at every replica once, which is what it costs not to need a ring.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from router.core.load import LoadIndex
from router.core.policies.base import Choice, ChoiceContext, candidates, without
from router.core.table import Member


class ConsistentHashPolicy:
    """See the module text."""

    def choose(self, context: ChoiceContext, indexes: Sequence[LoadIndex]) -> Choice | None:
        members = without(candidates(indexes), context.avoid)
        if not members:
            return None
        key = context.key.encode("utf-8", "surrogatepass")
        return Choice(max(members, key=lambda each: _weight(key, each)), "unpinned")


def _weight(key: bytes, member: Member) -> tuple[int, int]:
    # CRCs of similar texts are similar; the multiplication spreads them over 32 bits.
    mixed = zlib.crc32(member.name.encode(), zlib.crc32(key)) * 0x9E3779B1 & 0xFFFFFFFF
    return (mixed ^ mixed >> 15, -member.order)
