"""The rules of membership on written process tables: above all what must not be hit."""

from __future__ import annotations

from dataclasses import replace

from deploy.local.membership import UnitTrace, lineage, look_again, members_of, strays_of
from deploy.local.process_table import Identity, Marker, Process

OURS = Marker(run_id="r1", unit="decode-0")
OTHER_UNIT = Marker(run_id="r1", unit="decode-1")
OTHER_RUN = Marker(run_id="r0", unit="decode-0")
TRACE = UnitTrace(marker=OURS, leader=Identity(pid=100, start_ticks=1000))


def process(pid, *, start=2000, ppid=1, session=1, marker=None, alive=True):
    identity = Identity(pid=pid, start_ticks=start)
    return Process(identity=identity, comm="python", alive=alive, ppid=ppid, session=session, marker=marker)


def table(*processes):
    return {p.identity.pid: p for p in (process(1, start=1, ppid=0), *processes)}


def members(trace, *processes, protected=frozenset()):
    return {identity.pid for identity in members_of(trace, table(*processes), protected)}


LEADER = process(100, start=1000, session=100, marker=OURS)
DEAD_LEADER = replace(LEADER, alive=False)


def test_leader_session_marker_and_descendants():
    assert members(
        TRACE,
        LEADER,
        process(101, session=100),
        process(102, session=102, marker=OURS),
        process(103, session=103, ppid=101),
        process(104, session=103),
        process(105, session=102),
        process(200, session=200),
        process(201, ppid=200, session=200, marker=OTHER_UNIT),
        process(202, marker=OTHER_RUN),
    ) == {100, 101, 102, 103, 104, 105}


def test_a_leader_is_itself_only_with_its_own_start():
    assert members(TRACE, process(100, start=999, session=100), process(101, ppid=100, session=100)) == set()


def test_zombies_are_no_members_but_keep_their_session():
    assert members(TRACE, DEAD_LEADER, process(101, session=100), process(102, session=100, alive=False)) == {101}


def test_session_of_a_leader_that_is_gone():
    assert members(
        TRACE,
        process(101, session=100),
        process(102, session=100, start=999),
        process(103, session=100, marker=OTHER_RUN),
        process(104, session=100, marker=OTHER_UNIT),
        process(105, session=100, marker=OURS),
    ) == {101, 105}


def test_session_of_a_pid_that_was_given_away_counts_only_with_the_marker():
    stranger = process(100, start=5000, session=100)
    assert members(TRACE, stranger, process(101, session=100, ppid=100), process(102, marker=OURS)) == {102}


def test_a_parent_younger_than_its_child_is_none():
    """Its pid was given away while the table was read."""
    assert members(TRACE, process(102, start=3000, marker=OURS), process(50, start=500, ppid=102)) == {102}


def test_protected_pids_and_what_hangs_on_them_are_left_out():
    assert members(
        TRACE, LEADER, process(101, ppid=100, marker=OURS), process(102, ppid=101), protected=frozenset({101})
    ) == {100}


def test_a_member_once_seen_stays_one():
    hidden = process(101, ppid=100, session=101)
    below = process(102, ppid=101, session=101)
    first = table(LEADER, hidden, below)
    trace = look_again(TRACE, first, members_of(TRACE, first, frozenset()))
    assert members(trace, replace(hidden, ppid=1), below) == {101, 102}
    assert members(trace, process(103, session=101)) == {103}
    assert members(trace, process(101, start=7000, session=101)) == set()
    assert members(TRACE, hidden, below) == set()


def test_a_member_once_seen_stays_one_though_its_session_was_opened_by_one_never_seen():
    orphan = process(101, ppid=100, session=77)
    first = table(LEADER, orphan)
    trace = look_again(TRACE, first, members_of(TRACE, first, frozenset()))
    assert members(trace, replace(orphan, ppid=1), process(102, session=77)) == {101}


def test_sessions_that_have_ended_are_forgotten():
    first = table(LEADER, process(101, ppid=100, session=101))
    trace = look_again(TRACE, first, members_of(TRACE, first, frozenset()))
    second = table(LEADER)
    trace = look_again(trace, second, members_of(trace, second, frozenset()))
    assert trace == replace(TRACE, seen=frozenset({LEADER.identity}), openers=frozenset({LEADER.identity}))


def test_strays_are_of_the_run_and_in_no_record():
    found = strays_of(
        "r1",
        table(
            LEADER,
            process(200, session=200, marker=OTHER_UNIT),
            process(201, session=200),
            process(202, marker=OTHER_RUN),
            process(203, session=203),
        ),
        frozenset({100}),
    )
    assert {identity.pid for identity in found} == {200, 201}


def test_lineage_ends_at_the_first_process():
    assert lineage(102, table(process(101), process(102, ppid=101))) == {102, 101, 1}
