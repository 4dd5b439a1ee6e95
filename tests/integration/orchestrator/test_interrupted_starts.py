"""Starts that are interrupted: what this call has begun is ended, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.control import over_http
from orchestrator.control.over_http import HttpControlPlane
from orchestrator.control.plane import ControlPlane
from orchestrator.supervisor.interfaces import Progress
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.planes import TOKEN, served
from tests.integration.orchestrator.serve_process import until
from tests.unit.orchestrator.cli_runs import JOB

WAIT_S = 60
COMMAND = [sys.executable, "-m", "orchestrator"]
NO_WISH_IS_THE_SAME = [
    sys.executable,
    "-c",
    "from orchestrator import cli, signals; signals.SAME_WISH_S = 0; cli.main()",
]


class Interrupting:
    """Progress that is interrupted once, where `when` says so."""

    def __init__(self, when: Callable[[Progress], bool]) -> None:
        self._when = when
        self._has_been = False

    def __call__(self, progress: Progress) -> None:
        if not self._has_been and self._when(progress):
            self._has_been = True
            raise KeyboardInterrupt


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def test_an_interrupted_start_is_ended(fleet: FakeFleet, control: ControlPlane) -> None:
    fleet.probe.never_ready.add("decode-0")

    def is_awaited(progress: Progress) -> bool:
        # What is done now is looked at a moment after the states of processes.
        states = {unit.name: unit.state for unit in progress.units}
        return "waiting for decode-0" in progress.now_doing and states["decode-0"] == "starting"

    with pytest.raises(KeyboardInterrupt):
        control.start(fleet.spec(), warn=lambda _notes: None, progress=Interrupting(is_awaited))
    assert control.job("demo").phase == "stopped"
    assert not fleet.machine.living


def test_somebody_elses_start_is_not_ended_by_an_interruption(
    fleet: FakeFleet, serve: Callable[[Any], httpx.Client]
) -> None:
    fleet.probe.never_ready.add("decode-0")
    control = served(fleet, serve)
    service, going_on = fleet.service(), threading.Event()
    admission = service.admit(fleet.spec())
    driving = threading.Thread(target=service.drive, args=(admission, lambda progress: going_on.set()))
    driving.start()
    assert going_on.wait(30)

    with pytest.raises(KeyboardInterrupt):
        control.start(fleet.spec(), warn=lambda _notes: None, progress=Interrupting(lambda _progress: True))
    assert control.job("demo").phase == "starting"
    fleet.probe.never_ready.clear()
    driving.join(30)
    assert control.job("demo").phase == "ready"


def test_a_job_that_comes_up_as_its_start_is_interrupted_is_ended(
    fleet: FakeFleet, serve: Callable[[Any], httpx.Client]
) -> None:
    fleet.probe.never_ready.add("decode-0")
    control = served(fleet, serve)

    def has_come_up(_progress: Progress) -> bool:
        fleet.probe.never_ready.clear()
        until("it is ready", lambda: fleet.store.get("demo").phase == "ready")
        return True

    with pytest.raises(KeyboardInterrupt):
        control.start(fleet.spec(), warn=lambda _notes: None, progress=Interrupting(has_come_up))
    assert control.job("demo").phase == "stopped"
    assert not fleet.machine.living


def test_a_later_run_is_not_ended_by_an_interruption(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> None:
    fleet.probe.never_ready.add("decode-0")
    control = served(fleet, serve)

    def is_replaced(_progress: Progress) -> bool:
        fleet.service().stop("demo")
        fleet.probe.never_ready.clear()
        fleet.running()
        return True

    with pytest.raises(KeyboardInterrupt):
        control.start(fleet.spec(), warn=lambda _notes: None, progress=Interrupting(is_replaced))
    job = fleet.store.get("demo")
    assert (job.run_id, job.phase) == ("run-1", "ready")


class Slow:
    """In front of a control plane: a start is held up until it may go on."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (scope["method"], scope["path"]) == ("POST", "/jobs"):
            self.is_asked.set()
            await run_in_threadpool(self.may_go_on.wait, WAIT_S)
        await self._app(scope, receive, send)


@pytest.fixture
def slow(fleet: FakeFleet) -> Iterator[Slow]:
    slow = Slow(build_app(fleet.service(), Access({TOKEN: "admin"})))
    yield slow
    slow.may_go_on.set()


@pytest.fixture
def up(
    slow: Slow, serve: Callable[[Any], httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """A `headrace up` that waits to hear what it has begun, and has been interrupted once."""
    begun: list[subprocess.Popen[str]] = []
    monkeypatch.setenv("HEADRACE_URL", str(serve(slow).base_url))
    monkeypatch.setenv("HEADRACE_API_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    (tmp_path / "job.toml").write_text(JOB.format(model="/model"))

    def start(command: list[str]) -> subprocess.Popen[str]:
        # A shell's background job ignores Ctrl-C, and its children inherit that.
        program = ["env", "--default-signal=INT", *command, "up", str(tmp_path / "job.toml")]
        process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
        begun.append(process)
        assert slow.is_asked.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "ending what this has begun of demo; interrupt again to leave it\n"
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interruptions_that_follow_at_once_are_one(
    up: Callable[[list[str]], subprocess.Popen[str]], slow: Slow, fleet: FakeFleet, sent: signal.Signals
) -> None:
    process = up(COMMAND)
    process.send_signal(sent)
    slow.may_go_on.set()
    assert process.communicate(timeout=WAIT_S)[1] == "interrupted; `headrace status` says whether anything is left\n"
    assert process.returncode == 130
    assert fleet.store.get("demo").phase == "stopped"
    assert not fleet.machine.living


def test_a_second_interruption_leaves_a_server_that_hangs(
    up: Callable[[list[str]], subprocess.Popen[str]], slow: Slow
) -> None:
    process = up(NO_WISH_IS_THE_SAME)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 130
    assert not slow.may_go_on.is_set()


def test_a_server_that_hangs_is_left_after_a_while(
    slow: Slow, serve: Callable[[Any], httpx.Client], fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = HttpControlPlane(str(serve(slow).base_url), TOKEN, is_local=True)
    monkeypatch.setattr(over_http, "PLANNED_WITHIN_S", 0.01)

    def interrupt(_sent: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def interrupt_once_asked() -> None:
        slow.is_asked.wait(WAIT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=interrupt_once_asked).start()
        with pytest.raises(KeyboardInterrupt):
            control.start(fleet.spec(), warn=lambda _notes: None, progress=fleet.shown.append)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not slow.may_go_on.is_set()
