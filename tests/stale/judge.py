"""Says of replies whether they were computed from stale KV. Pure: replies and reference values in, verdicts out.

`play.py` collects the replies, `reference.py` has the values that each is held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.fleet.versions import weights_of
from tests.stale.schedule import BLOCK, Ask

TOLERANCE = 1e-4
"""Between log-probabilities of one engine and another on the same weights, float32."""

Outcome = Literal["whole", "left", "refused"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a client got of one request."""

    schedule: int
    ask: Ask
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    outcome: Outcome
    detail: str
    """What a refusal said."""
    epochs: tuple[int, ...]
    """Those that it was made in; empty where the reply did not say."""
    versions: tuple[str, ...]
    """Of each epoch, as the fleet names them: see `fleet/versions.py`."""
    single_version: bool
    attempts: int
    """How often it was begun; what an attempt without a token for the client was made in is not said."""
    may_be_kept: bool
    """It met an update that lets requests live on."""
    cached_tokens: int
    """Of the prompt, that the prefill engine did not compute."""
    replicas: str
    started_s: float
    ended_s: float

    @property
    def of_one_epoch(self) -> bool:
        """All of it: its prompt and every token."""
        return self.outcome == "whole" and self.single_version

    def may_have_run_in(self, epoch: int) -> bool:
        return epoch in self.epochs or not self.epochs or self.attempts != len(self.epochs)

    @property
    def judged(self) -> bool:
        """One that was run again under new weights, from the tokens that its client had, is: all KV of the second part
        is new. One that lived on through an update has KV of both."""
        return self.of_one_epoch or (self.outcome == "whole" and len(self.versions) > 1 and not self.may_be_kept)

    @property
    def weights(self) -> tuple[int, ...]:
        """The numbers of the sets that it was made with, in this order."""
        return tuple(weights_of(version) for version in self.versions)


@dataclass(frozen=True, kw_only=True)
class Stale:
    """A reply whose tokens are not what the weights that it names give."""

    reply: Reply
    at: int
    """The first token that is off."""
    off_by: float

    def __str__(self) -> str:
        reply = self.reply
        return (
            f"schedule {reply.schedule}, {reply.ask.talk}: off by {self.off_by:.2e} from token {self.at} of "
            f"{len(reply.logprobs)}; epochs {reply.epochs}, {reply.versions}, {reply.replicas}, prompt of "
            f"{len(reply.prompt)}, {reply.cached_tokens} cached"
        )


def judge(reply: Reply, references: Sequence[Sequence[float]]) -> Stale | None:
    """Hold a reply against the log-probabilities that a cache-less engine gives its tokens, on each of its weights: the
    first tokens come from the first, the rest from the next."""
    stage = 0
    for place, got in enumerate(reply.logprobs):
        apart = [abs(got - reference[place]) for reference in references]
        while stage < len(references) and apart[stage] > TOLERANCE:
            stage += 1
        if stage == len(references):
            return Stale(reply=reply, off_by=min(apart), at=place)
    return None


@dataclass(frozen=True, kw_only=True)
class Across:
    """Cached tokens of a reply that nothing of its epoch can have left behind."""

    reply: Reply
    tokens: int

    def __str__(self) -> str:
        reply = self.reply
        return (
            f"schedule {reply.schedule}, {reply.ask.talk}: {self.tokens} of {reply.cached_tokens} cached tokens are of "
            f"another epoch than {reply.epochs}, {reply.versions}, {reply.replicas}, prompt of {len(reply.prompt)}, "
            f"{reply.started_s:.1f} s to {reply.ended_s:.1f} s"
        )


def hits_across_epochs(replies: Sequence[Reply], everything: Sequence[Reply]) -> list[Across]:
    """Cached prompt tokens that nothing of the same epoch and salt in `everything` can have left behind.

    A request that does not say the epochs of all its attempts may have run in any, and one that was begun again may
    find what it has itself left behind.
    """
    asked = (reply for reply in replies if reply.of_one_epoch and reply.attempts == 1)
    found = ((reply, reply.cached_tokens - _known(reply, everything)) for reply in asked)
    return [Across(reply=reply, tokens=tokens) for reply, tokens in found if tokens > 0]


def crossings(replies: Sequence[Reply], everything: Sequence[Reply]) -> int:
    """Replies to which a cache without epochs would have given more hits than their own epoch could: without them the
    count of hits across epochs says nothing."""
    chances = (reply for reply in replies if reply.of_one_epoch)
    return sum(1 for reply in chances if _known_before(reply, everything) > _known(reply, everything))


def _known(reply: Reply, everything: Sequence[Reply]) -> int:
    """Prompt tokens, in whole blocks, that requests which may have run in the reply's epoch had in common with it."""
    return _longest(reply, [other for other in everything if other.may_have_run_in(reply.epochs[0])])


def _known_before(reply: Reply, everything: Sequence[Reply]) -> int:
    """The same, of requests that ended before it began."""
    return _longest(reply, [other for other in everything if other.ended_s < reply.started_s])


def _longest(reply: Reply, others: Sequence[Reply]) -> int:
    shared = (
        _common_length(reply.prompt, (*other.prompt, *other.token_ids))
        for other in others
        if other is not reply and other.ask.salt == reply.ask.salt and other.started_s < reply.ended_s
    )
    return max(shared, default=0) // BLOCK * BLOCK


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return place
    return min(len(one), len(other))
