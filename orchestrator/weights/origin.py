"""Where a load gets its weights: from the source that came with the version, or from a peer that holds them.

A version that the job serves may have lost its source: a trainer's memory moves on, a folder goes. So once a load of
it has failed, the next tries go to peers, as long as there are any. `needs.py` asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.weights.knowledge import Knowledge


@dataclass(frozen=True, kw_only=True)
class Origin:
    source: Mapping[str, Any]
    peer: str
    """Whose weights it is; empty for the version's own source."""


def origin(known: Knowledge) -> Origin | None:
    """Of the loads of this phase. None: somebody has to be read, or asked to serve, first."""
    own = Origin(source=known.target.source, peer="")
    if not _tries_peers(known):
        return own
    if not _is_settled(known):
        return None
    peer = _peer(known)
    if peer is None:
        return own
    source = _served(peer, known)
    return None if source is None else Origin(source=source, peer=peer)


def peer_to_ask(known: Knowledge) -> str | None:
    """Who has to serve its weights before the loads of this phase can go on."""
    if known.course.phase != "load" or not _tries_peers(known) or not _is_settled(known) or not known.lacking_load():
        return None
    peer = _peer(known)
    return peer if peer is not None and _served(peer, known) is None else None


def _tries_peers(known: Knowledge) -> bool:
    """Nobody holds a new version yet, so its source is all there is."""
    return known.course.going != "forward" and known.course.failures > 0


def _is_settled(known: Knowledge) -> bool:
    """Whoever is not read yet may be a peer, or be none any more."""
    return all(known.engines[name] is not None for name in known.present())


def _peer(known: Knowledge) -> str | None:
    """Another one in each try. Whoever has answered and does not serve cannot."""
    able = [name for name in known.holders() if name not in known.asked or _served(name, known) is not None]
    return able[(known.course.failures - 1) % len(able)] if able else None


def _served(name: str, known: Knowledge) -> Mapping[str, Any] | None:
    engine = known.engines[name]
    source = None if engine is None else engine.served
    return source if source is not None and source["version"] == known.target.version else None
