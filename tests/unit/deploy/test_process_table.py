from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

import pytest

from deploy.local import process_table
from deploy.local.process_table import (
    Identity,
    Marker,
    Process,
    SharedReading,
    is_alive,
    parse_marker,
    parse_stat,
    read_identity,
    read_process,
)

RECORDED = (
    "4961 ({comm}) {state} 4894 4894 3851 0 -1 4194304 97 0 0 0 0 0 0 0 20 0 {threads} 0 66894 3133440 358 "
    "18446744073709551615 94881356603392 94881356623273 140728940379696 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 "
    "94881356639280 94881356640896 94882060742656 140728940387034 140728940387054 140728940387054 140728940388331 0\n"
)


def stat(comm: str = "cat", state: str = "S", threads: int = 1) -> Process:
    return parse_stat(RECORDED.format(comm=comm, state=state, threads=threads), None)


@pytest.mark.parametrize("comm", ["cat", "tmux: server", "(sd-pam)", "a) S 1 1 1", "VLLM::EngineCor", "new\nline", ""])
def test_stat_is_read_whatever_the_command_is_called(comm):
    assert stat(comm=comm) == Process(
        identity=Identity(pid=4961, start_ticks=66894), comm=comm, alive=True, ppid=4894, session=3851, marker=None
    )


@pytest.mark.parametrize(
    ("state", "threads", "alive"),
    [("R", 1, True), ("D", 1, True), ("T", 1, True), ("Z", 1, False), ("X", 0, False), ("Z", 4, True)],
)
def test_zombies_are_dead_unless_other_threads_go_on(state, threads, alive):
    assert stat(state=state, threads=threads).alive is alive


@pytest.mark.parametrize(
    ("environ", "marker"),
    [
        (b"A=1\0HEADRACE_RUN_ID=r1\0HEADRACE_UNIT=decode-0\0", Marker(run_id="r1", unit="decode-0")),
        (b"HEADRACE_UNIT=decode-0\0HEADRACE_RUN_ID=r1", Marker(run_id="r1", unit="decode-0")),
        (b"HEADRACE_RUN_ID=r1\0HEADRACE_RUN_ID=r2\0HEADRACE_UNIT=u\0", Marker(run_id="r1", unit="u")),
        (b"HEADRACE_RUN_ID=r1\0", None),
        (b"X=HEADRACE_RUN_ID=r1\0XHEADRACE_UNIT=u\0", None),
        (b"VLLM::EngineCore\0\0\0\0\xff\xfe", None),
        (b"", None),
    ],
)
def test_marker_is_found_in_an_environment(environ, marker):
    assert parse_marker(environ) == marker


def test_a_pid_that_is_gone_is_no_error():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert read_process(child) is None
    assert read_identity(child) is None


def test_own_process_is_read():
    me = read_process(os.getpid())
    assert me is not None
    assert (me.alive, me.ppid, me.session) == (True, os.getppid(), os.getsid(0))
    assert read_identity(os.getpid()) == me.identity


def test_a_life_is_alive_and_another_one_of_its_pid_is_not():
    mine = read_identity(os.getpid())
    assert mine is not None
    assert is_alive(mine)
    assert not is_alive(Identity(pid=mine.pid, start_ticks=mine.start_ticks + 1))


def test_nobody_gets_a_reading_that_began_before_it_asked(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def reading() -> Mapping[int, Process]:
        begun.set()
        assert go_on.wait(10)
        return {}

    monkeypatch.setattr(process_table, "snapshot", reading)
    ask = SharedReading()
    answers: dict[str, Mapping[int, Process]] = {}
    threads = [threading.Thread(target=lambda name=name: answers.update({name: ask()})) for name in ("early", "late")]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert answers["early"] is not answers["late"]


def test_those_who_ask_at_once_share_readings(monkeypatch):
    readings: list[None] = []

    def reading() -> Mapping[int, Process]:
        readings.append(None)
        time.sleep(0.005)
        return {}

    monkeypatch.setattr(process_table, "snapshot", reading)
    ask = SharedReading()
    threads = [threading.Thread(target=lambda: [ask() for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(readings) < 8 * 20 * 3 / 4
