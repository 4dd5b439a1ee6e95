"""Which processes belong to a unit: decided on a snapshot of the process table, without touching anything.

`process_table` takes the snapshot, `backend` acts on the answer. A process is a member of a unit if it
  - is the recorded leader (same pid and same start),
  - carries the run's and the unit's marker in its environment,
  - is in a session that the leader, or a member seen before, opened,
  - descends from a member, or
  - was a member when this backend looked before.

No single source is enough. Children outlive a killed leader, which breaks the chain of parents; they open
sessions of their own, which breaks the session; setproctitle overwrites the environment, which breaks the marker.

Linux gives no new process a pid that is still in use as a session id. So the session of a leader that is gone is
doubtful only if the whole session ended and another process then got the pid and opened a session; the rules
of `_session_holds` exclude what can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from deploy.local.process_table import Identity, Marker, Process


@dataclass(frozen=True, kw_only=True)
class UnitTrace:
    """What is known of a unit before looking: from its record and from earlier looks."""

    marker: Marker
    leader: Identity
    seen: frozenset[Identity] = frozenset()
    """All members at the last look."""
    openers: frozenset[Identity] = frozenset()
    """Members, dead ones included, that opened sessions in which members still were at the last look."""


def members_of(trace: UnitTrace, table: Mapping[int, Process], protected: Set[int]) -> frozenset[Identity]:
    """The living members of one unit; `protected` pids are never among them."""
    openers = trace.openers | {trace.leader}

    def is_known(process: Process) -> bool:
        return (
            process.marker == trace.marker
            or process.identity == trace.leader
            or process.identity in trace.seen
            or any(_session_holds(opener, process, table, trace.marker) for opener in openers)
        )

    return _family(is_known, table, protected)


def strays_of(run_id: str, table: Mapping[int, Process], excluded: Set[int]) -> frozenset[Identity]:
    """All living processes of a run except `excluded` ones (members of recorded units, and the protected)."""

    def is_known(process: Process) -> bool:
        return process.marker is not None and process.marker.run_id == run_id

    return _family(is_known, table, excluded)


def look_again(trace: UnitTrace, table: Mapping[int, Process], members: frozenset[Identity]) -> UnitTrace:
    """The trace to look with the next time: members are remembered, sessions that have ended forgotten."""
    used = {table[member.pid].session for member in members}
    openers = trace.openers | {member for member in members if table[member.pid].session == member.pid}
    return replace(trace, seen=members, openers=frozenset(opener for opener in openers if opener.pid in used))


def lineage(pid: int, table: Mapping[int, Process]) -> frozenset[int]:
    """`pid` and its ancestors: whoever asks for a unit to be ended must not be ended by it."""
    line: set[int] = set()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].ppid
    return frozenset(line)


def _family(
    is_known: Callable[[Process], bool], table: Mapping[int, Process], excluded: Set[int]
) -> frozenset[Identity]:
    """The known processes with their descendants and the sessions opened by any of these."""
    candidates = {pid: process for pid, process in table.items() if process.alive and pid not in excluded}
    family = {pid for pid, process in candidates.items() if is_known(process)}
    while True:
        openers = {pid for pid in family if table[pid].session == pid}
        joined = {
            pid
            for pid, process in candidates.items()
            if pid not in family and (process.session in openers or _descends(process, family, table))
        }
        if not joined:
            return frozenset(table[pid].identity for pid in family)
        family |= joined


def _descends(process: Process, family: Set[int], table: Mapping[int, Process]) -> bool:
    # The table is not one instant: a parent read early may be gone and its pid taken by a younger process.
    parent = process.ppid
    return parent in family and table[parent].identity.start_ticks <= process.identity.start_ticks


def _session_holds(opener: Identity, process: Process, table: Mapping[int, Process], marker: Marker) -> bool:
    """Whether `process` is in the session that `opener`, dead or alive, opened."""
    if process.session != opener.pid:
        return False
    holder = table.get(opener.pid)
    if holder is not None:
        return holder.identity == opener
    started_later = process.identity.start_ticks >= opener.start_ticks
    belongs_elsewhere = process.marker is not None and process.marker != marker
    return started_later and not belongs_elsewhere
