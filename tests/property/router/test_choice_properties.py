"""Where sessions and legs go under arbitrary input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.fleet import Fleet, Reservation
from tests.unit.router.fleets import bring_up, change, end, make_fleet, make_index, place, take_out

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples are not timed: a busy machine is no failure."""

STEADY = st.integers(1, 6)
FLICKERING = ["decode-0", "decode-1"]
"""They come and go; the others are there throughout."""
STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "request ends", "session ends", "flicker"]), st.integers(0, 99)),
    max_size=60,
)


class Sessions:
    """New sessions over a fleet of which some replicas come and go."""

    def __init__(self, steady: int) -> None:
        self.fleet: Fleet = make_fleet(decode=steady + len(FLICKERING))
        self.steady = [name for name in self.fleet.members if name not in FLICKERING]
        self.chosen: Counter[str] = Counter()
        self.open: list[Reservation] = []
        self.count = 0

    def arrive(self) -> Reservation:
        self.count += 1
        made = place(self.fleet, self.fleet.sessions.begin_request(f"s{self.count}"), tokens=self.count % 7)
        assert made.reason == "new"
        self.chosen[made.member.name] += 1
        self.open.append(made)
        return made

    def end(self, which: int) -> Reservation | None:
        """One request ends; its session stays."""
        if not self.open:
            return None
        made = self.open.pop(which % len(self.open))
        end(self.fleet, made)
        self.fleet.end_request(made.session, 0.0)
        return made

    def flicker(self, which: int) -> None:
        name = FLICKERING[which % len(FLICKERING)]
        if which % 3 == 0:
            self.fleet.add(name=name, role="decode", url="http://again", instance=f"life-{which}")
        elif which % 3 == 1:
            take_out(self.fleet, name)
        else:
            self.fleet.drain(name, which % 2 == 0)
        if which % 5 == 0:
            bring_up(self.fleet, name)

    def active(self) -> list[int]:
        return [self.fleet.members[name].sessions for name in self.steady]


def spread(counts: Sequence[int]) -> int:
    return max(counts) - min(counts)


@UNTIMED
@given(steady=STEADY, steps=STEPS)
def test_a11_sessions_that_stay_are_even_within_1_at_every_moment(steady: int, steps: list[tuple[str, int]]) -> None:
    sessions = Sessions(steady)
    for step, which in steps:
        if step == "arrive":
            sessions.arrive()
        elif step == "flicker":
            sessions.flicker(which)
        else:
            sessions.end(which)
        assert spread(sessions.active()) <= 1


@UNTIMED
@given(steady=STEADY, steps=STEPS)
def test_a11_sessions_that_end_before_the_next_are_even_within_1(steady: int, steps: list[tuple[str, int]]) -> None:
    sessions = Sessions(steady)
    for step, which in steps:
        if step == "flicker":
            sessions.flicker(which)
            continue
        made = sessions.arrive()
        sessions.end(0)
        sessions.fleet.finish_session(str(made.session.id))
        assert spread([sessions.chosen[name] for name in sessions.steady]) <= 1


@UNTIMED
@given(steady=STEADY, steps=STEPS)
def test_a11_a_new_session_goes_where_the_fewest_are_whoever_has_ended(
    steady: int, steps: list[tuple[str, int]]
) -> None:
    sessions = Sessions(steady)
    for step, which in steps:
        if step == "arrive":
            usable = [member for member in sessions.fleet.members.values() if member.usable]
            fewest = min(member.sessions for member in usable)
            assert sessions.arrive().member.sessions == fewest + 1
        elif step == "flicker":
            sessions.flicker(which)
        else:
            made = sessions.end(which)
            if made is not None and step == "session ends":
                sessions.fleet.finish_session(str(made.session.id))


CHANGES = st.tuples(
    st.integers(0, 3), st.sampled_from(["sessions", "tokens", "legs", "chosen", "gone", "there"]), st.integers(0, 3)
)


@UNTIMED
@given(changes=st.lists(CHANGES, max_size=60), avoid=st.frozensets(st.sampled_from("abcd")))
def test_the_index_finds_what_a_scan_finds(changes: list[tuple[int, str, int]], avoid: frozenset[str]) -> None:
    index, members = make_index(*"abcd", max_legs=3)
    there = set(members)
    for which, what, amount in changes:
        member: Any = members[which]
        if what == "gone" and member in there:
            there.discard(member)
            index.discard(member)
        elif what == "there" and member not in there:
            there.add(member)
            index.add(member)
        elif what in ("sessions", "tokens", "legs", "chosen") and member in there:
            change(member, **{what: amount})
        with_room = [each for each in members if each in there and each.legs < 3]
        assert index.in_order() == with_room
        assert len(index) == len(there)
        best = min(
            (each for each in with_room if each.name not in avoid),
            key=lambda each: (each.sessions, each.tokens, each.chosen, each.order),
            default=None,
        )
        assert index.least_loaded(avoid) is best
