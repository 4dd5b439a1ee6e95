"""Field case A32: nothing of a unit outlives its end, and nothing else is touched."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.backend import LocalBackend
from deploy.local.process_table import read_process
from deploy.local.signals import send_signal
from deploy.unit import UnitRecord

LIMIT_S = 10.0
EVERY_HABIT = ("plain", "ignore-term", "own-session", "clear-env", "overwrite-env")


def with_children(*habits: str) -> tuple[str, ...]:
    return tuple(word for habit in habits for word in ("--child", habit))


def test_a32_child_that_ignores_sigterm_is_gone_after_stop(workshop):
    record = workshop.start(*with_children("ignore-term"))
    child = workshop.pid("decode-0.ignore-term")
    begun = time.monotonic()
    assert workshop.backend.stop(workshop.run, [record], grace_s=1.0) == ()
    assert time.monotonic() - begun < LIMIT_S
    assert not workshop.lives(child)
    status = workshop.backend.poll(workshop.run, [record])["decode-0"]
    assert (status.alive, status.members, status.exit_code) == (False, (), -signal.SIGTERM)


@pytest.mark.parametrize("habit", EVERY_HABIT)
def test_a32_child_is_found_after_kill_9_of_its_parent(workshop, habit):
    record = workshop.start(*with_children(habit))
    child = workshop.pid(f"decode-0.{habit}")
    os.kill(record.pid, signal.SIGKILL)
    workshop.wait_until(lambda: not workshop.lives(record.pid), "the leader is dead")
    status = workshop.backend.poll(workshop.run, [record])["decode-0"]
    assert (status.alive, status.members, status.exit_code) == (False, (child,), -signal.SIGKILL)
    assert workshop.backend.stop(workshop.run, [record], grace_s=0.5) == ()
    assert not workshop.lives(child)


def test_a32_children_are_found_from_the_record_alone(workshop):
    """The orchestrator is gone, the leader is killed, and a backend that started nothing ends the rest."""
    starter = Path(__file__).with_name("start_and_leave.py")
    argv = workshop.argv(*with_children(*EVERY_HABIT), label="decode-0")
    command = [sys.executable, str(starter), workshop.run.run_id, str(workshop.run.log_dir), "decode-0", *argv]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    record = UnitRecord(**{**told, "log": Path(told["log"])})
    children = {workshop.pid(f"decode-0.{habit}") for habit in EVERY_HABIT}
    leader = workshop.pid("decode-0")
    newcomer = LocalBackend()
    status = newcomer.poll(workshop.run, [record])["decode-0"]
    assert (status.alive, set(status.members), status.exit_code) == (True, children | {leader}, None)

    os.kill(leader, signal.SIGKILL)
    workshop.wait_until(lambda: not workshop.lives(leader), "the leader is dead")
    assert set(newcomer.poll(workshop.run, [record])["decode-0"].members) == children
    assert LocalBackend().stop(workshop.run, [record], grace_s=0.5) == ()
    assert not any(workshop.lives(child) for child in children)


def test_a32_grandchildren_of_a_hidden_child_are_ended(workshop):
    """A child without marker and session is known by its parent; once seen, also after the parent's death."""
    record = workshop.start("--depth", "1", *with_children("hide"))
    hidden, below = workshop.pid("decode-0.hide"), workshop.pid("decode-0.hide.plain")
    assert set(workshop.backend.poll(workshop.run, [record])["decode-0"].members) == {record.pid, hidden, below}
    os.kill(record.pid, signal.SIGKILL)
    os.kill(hidden, signal.SIGKILL)
    workshop.wait_until(lambda: not workshop.lives(record.pid) and not workshop.lives(hidden), "both are dead")
    assert workshop.backend.stop(workshop.run, [record], grace_s=1.0) == ()
    assert not workshop.lives(below)


def test_a32_another_process_of_the_same_name_is_not_touched(workshop):
    outsider = workshop.start_outsider(*with_children("plain"), label="outsider")
    record = workshop.start(*with_children("plain"))
    other_unit = workshop.start(name="decode-1")
    assert read_process(outsider).comm == read_process(record.pid).comm
    assert workshop.backend.stop(workshop.run, [record], grace_s=1.0) == ()
    assert workshop.lives(outsider)
    assert workshop.lives(workshop.pid("outsider.plain"))
    assert workshop.backend.poll(workshop.run, [other_unit])["decode-1"].alive


def test_a32_record_whose_pid_is_another_process_now_hits_nothing(workshop):
    outsider = workshop.start_outsider(*with_children("plain"), label="outsider")
    real = workshop.start(name="decode-1")
    taken = replace(real, name="decode-0", pid=outsider, start_ticks=read_process(outsider).identity.start_ticks - 1)
    status = workshop.backend.poll(workshop.run, [taken])["decode-0"]
    assert (status.alive, status.members) == (False, ())
    assert workshop.backend.stop(workshop.run, [taken], grace_s=0.0) == ()
    assert workshop.survives(outsider)
    assert workshop.lives(workshop.pid("outsider.plain"))


def test_a32_record_from_before_a_reboot_hits_nothing(workshop):
    record = workshop.start()
    old = replace(record, boot_id="00000000-0000-0000-0000-000000000000")
    assert workshop.backend.stop(workshop.run, [old], grace_s=0.0) == ()
    assert workshop.backend.poll(workshop.run, [old])["decode-0"].members == ()
    assert workshop.survives(record.pid)


def test_a32_sweep_ends_what_is_in_no_record(workshop):
    recorded = workshop.start(*with_children("plain"))
    unrecorded = workshop.start(*with_children("ignore-term", "clear-env"), name="decode-1")
    outsider = workshop.start_outsider(label="outsider")
    children = [workshop.pid("decode-1.ignore-term"), workshop.pid("decode-1.clear-env")]
    assert LocalBackend().sweep(workshop.run, [recorded], grace_s=0.5) == ()
    assert not any(workshop.lives(pid) for pid in (unrecorded.pid, *children))
    assert all(workshop.lives(pid) for pid in (recorded.pid, workshop.pid("decode-0.plain"), outsider))


def test_a32_many_units_end_in_one_grace_time(workshop):
    records = [workshop.start("--ignore-term", name=f"decode-{number}") for number in range(6)]
    begun = time.monotonic()
    assert workshop.backend.stop(workshop.run, records, grace_s=2.0) == ()
    assert time.monotonic() - begun < LIMIT_S
    assert {status.exit_code for status in workshop.backend.poll(workshop.run, records).values()} == {-signal.SIGKILL}


def test_a_unit_that_ends_by_itself_is_dead_and_has_its_exit_code(workshop):
    record = workshop.start("--exit", "3")
    workshop.wait_until(lambda: not workshop.lives(record.pid), "the stub has ended")
    status = workshop.backend.poll(workshop.run, [record])["decode-0"]
    assert (status.alive, status.members, status.exit_code) == (False, (), 3)


def test_a_zombie_of_another_parent_counts_as_dead(workshop):
    outsider = workshop.start_outsider("--exit", "0", label="outsider")
    workshop.wait_until(lambda: not workshop.lives(outsider), "the stub has ended")
    zombie = read_process(outsider)
    assert zombie is not None
    template = workshop.start(name="decode-1")
    record = replace(template, name="decode-0", pid=outsider, start_ticks=zombie.identity.start_ticks)
    status = workshop.backend.poll(workshop.run, [record])["decode-0"]
    assert (status.alive, status.members, status.exit_code) == (False, (), None)
    assert workshop.backend.stop(workshop.run, [record], grace_s=0.0) == ()


def test_units_are_ended_where_there_is_no_pidfd(workshop, monkeypatch):
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    record = workshop.start(*with_children("ignore-term"))
    child = workshop.pid("decode-0.ignore-term")
    assert workshop.backend.stop(workshop.run, [record], grace_s=0.5) == ()
    assert not workshop.lives(record.pid)
    assert not workshop.lives(child)


def test_a_signal_is_not_sent_to_another_life_of_a_pid(workshop):
    outsider = workshop.start_outsider(label="outsider")
    identity = read_process(outsider).identity
    send_signal(replace(identity, start_ticks=identity.start_ticks - 1), signal.SIGKILL)
    assert workshop.survives(outsider)
    send_signal(identity, signal.SIGKILL)
    workshop.wait_until(lambda: not workshop.lives(outsider), "the stub is dead")
    send_signal(identity, signal.SIGKILL)


def test_stop_of_nothing_left_is_quiet(workshop):
    record = workshop.start("--exit", "0")
    assert workshop.backend.stop(workshop.run, [record], grace_s=5.0) == ()
    assert workshop.backend.stop(workshop.run, [record], grace_s=5.0) == ()
    assert workshop.backend.stop(workshop.run, [], grace_s=5.0) == ()
