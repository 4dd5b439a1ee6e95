"""What happens in one schedule: who asks what and when, which updates come, what goes wrong. Pure: a seed makes it.

`play.py` carries a schedule out, `check.py` runs many of them. Times are seconds from the start of a round; what they
meet on the way is the machine's affair, so a seed gives the same acts again and not the same interleaving.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tests.fleet.versions import WEIGHTS

Strategy = Literal["barrier", "rolling"]
InFlight = Literal["readmit", "wait", "abort", "keep"]
FaultKind = Literal["slow_store", "slow_engine", "kill"]

BLOCK = 32
TALKS = 6
COMMON = tuple((place * 37 + 11) % 250 + 1 for place in range(3 * BLOCK))
"""A beginning that conversations of all schedules share: the pool has it in every epoch that was."""
LONGEST_COMPLETION = 24


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The next turn of a conversation."""

    talk: str
    """The conversation."""
    session: str
    """What it calls its session; under a new name it may land on other engines and read all from the pool."""
    salt: str
    """The client's own `cache_salt`; empty where it sends none."""
    new_part: tuple[int, ...]
    """What is asked after all that the conversation has said and heard so far."""
    completion: int
    starts_s: float
    """Or once the turn before has ended, whichever comes later."""
    stream: bool
    sampling_seed: int | None
    """None: greedy."""
    leaves_s: float | None
    """The client closes its connection after so long."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Other weights for the whole fleet."""

    further: int
    """Which set of weights: so many after the one that the fleet has, from the first again after the last."""
    starts_s: float
    strategy: Strategy
    in_flight: InFlight
    fails_first: bool
    """A source that does not fit comes before the right one."""
    stalls: str
    """An engine that stands still for longer than a handoff's lease once it is paused; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong beside the requests."""

    kind: FaultKind
    target: str
    """An engine or a storage client, by its name in the job."""
    starts_s: float
    lasts_s: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """Things that go on at the same time; the next round begins when all have ended."""

    asks: tuple[Ask, ...]
    update: Update | None = None
    fault: Fault | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    rounds: tuple[Round, ...]

    def __str__(self) -> str:
        said = []
        for each in self.rounds:
            if each.update is not None:
                change = each.update
                extras = " fails first" * change.fails_first + f" {change.stalls} stalls" * bool(change.stalls)
                said.append(f"{change.strategy}/{change.in_flight}{extras}")
            if each.fault is not None:
                said.append(f"{each.fault.kind} {each.fault.target}")
        return ", ".join(said)


def make_schedule(seed: int, engines: Sequence[str], storage: str) -> Schedule:
    """Five rounds, an update in the second and the fourth."""
    dice = random.Random(seed)
    first = _update(dice, stalls=dice.choice(list(engines)) if seed % 8 == 0 else "")
    second = _update(dice, stalls="")
    talks = [_Talk(dice, f"s{seed}-{number}", number) for number in range(TALKS)]
    return Schedule(
        seed=seed,
        rounds=(
            Round(asks=_asks(dice, talks, calm=True)),
            Round(asks=_asks(dice, talks, calm=False), update=first, fault=_fault(dice, engines, storage)),
            Round(asks=_asks(dice, dice.sample(talks, 4), calm=True)),
            Round(asks=_asks(dice, talks, calm=False), update=second, fault=_fault(dice, engines, storage)),
            Round(asks=_asks(dice, dice.sample(talks, 4), calm=True)),
        ),
    )


def _update(dice: random.Random, stalls: str) -> Update:
    return Update(
        further=dice.randrange(1, WEIGHTS),
        starts_s=round(dice.uniform(0.0, 2.0), 2),
        strategy=dice.choice(get_args(Strategy)),
        in_flight=dice.choice(get_args(InFlight)),
        fails_first=dice.random() < 0.2,
        stalls=stalls,
    )


class _Talk:
    """One conversation, and how its client behaves."""

    def __init__(self, dice: random.Random, name: str, number: int) -> None:
        self.name = name
        self.salt = "of-a-client" if number == TALKS - 1 else ""
        self.stream = dice.random() < 0.5
        self.sampled = dice.random() < 0.5
        self._opening = COMMON if number % 2 else ()
        self._begun = False
        self._names = 1

    def session(self, dice: random.Random) -> str:
        if self._begun and dice.random() < 0.5:
            self._names += 1
        return f"{self.name}-{self._names}"

    def new_part(self, dice: random.Random) -> tuple[int, ...]:
        length = dice.randint(8, 60) if self._begun else dice.randint(30, 200)
        opening = () if self._begun else self._opening
        self._begun = True
        return (*opening, *(dice.randint(1, 250) for _ in range(length)))


def _asks(dice: random.Random, talks: Sequence[_Talk], *, calm: bool) -> tuple[Ask, ...]:
    """One turn each. In a round that is not calm they come while weights move, and some clients leave."""
    return tuple(
        Ask(
            talk=talk.name,
            session=talk.session(dice),
            salt=talk.salt,
            new_part=talk.new_part(dice),
            completion=dice.randint(4, LONGEST_COMPLETION),
            starts_s=round(dice.uniform(0.0, 0.5 if calm else 2.5), 2),
            stream=talk.stream,
            sampling_seed=dice.randint(1, 1 << 30) if talk.sampled else None,
            leaves_s=None if calm or dice.random() < 0.8 else round(dice.uniform(0.1, 2.0), 2),
        )
        for talk in talks
    )


def _fault(dice: random.Random, engines: Sequence[str], storage: str) -> Fault | None:
    """Half of all updates have none."""
    if dice.random() < 0.5:
        return None
    kind: FaultKind = dice.choice(get_args(FaultKind))
    return Fault(
        kind=kind,
        target=storage if kind == "slow_store" else dice.choice(list(engines)),
        starts_s=round(dice.uniform(0.0, 2.5), 2),
        lasts_s=round(dice.uniform(1.0, 4.0), 2),
    )
