"""`headrace serve` as a process: killed while jobs start, run and stop, and followed by another; told to end; started
twice. The jobs' processes are real and compute nothing."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.local.backend import LocalBackend
from orchestrator.control.over_http import HttpControlPlane
from orchestrator.errors import ProblemAnswered
from orchestrator.exit_codes import ExitCode, exit_code_of
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore
from tests.fakes.stub_job import PROCESSES, free_ports, record, run, stub_plan
from tests.integration.orchestrator.serve_process import WAIT_S, Serve, until

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    serve = Serve(tmp_path)
    try:
        yield serve
    finally:
        serve.close()
        store, backend = JobStore(Database(tmp_path)), LocalBackend()
        for head in store.heads():
            assert backend.sweep(head.run, (), 0.5) == ()


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(Database(tmp_path))


def living(store: JobStore) -> set[int]:
    """Every process of the job, whoever started it."""
    job = store.get("stub")
    statuses = LocalBackend().poll(job.run, job.records)
    return {pid for status in statuses.values() for pid in status.members}


def test_killed_while_a_job_starts(serve: Serve, store: JobStore) -> None:
    """The next one goes on with the start, and starts nothing twice."""
    record(store, stub_plan(serve.home, "stub", free_ports(3), silent="router"))
    serve.start()
    until("all processes run", lambda: len(living(store)) == 3)
    serve.kill()
    before = living(store)
    assert len(before) == 3
    serve.start()
    found = serve.adopted("stub")
    assert found["text"].startswith("its start goes on under pid")
    assert found["data"]["processes"] == {"prefill-0": "ready", "decode-0": "ready", "router": "starting"}
    assert living(store) == before
    assert serve.client.delete("/jobs/stub").json()["phase"] == "stopped"
    assert living(store) == set()


def test_killed_while_a_job_runs_and_while_it_stops(serve: Serve, store: JobStore) -> None:
    """It runs on meanwhile; the next one says what it found, and ends what was asked to end."""
    backend = LocalBackend()
    run(store, backend, stub_plan(serve.home, "stub", free_ports(3), "--ignore-term", stop_grace_s=4))
    serve.start()
    serve.adopted("stub")
    serve.kill()
    before = living(store)
    assert len(before) == 3
    serve.start()
    found = serve.adopted("stub")
    assert found["text"].startswith("supervised under pid")
    assert found["data"]["processes"] == dict.fromkeys(PROCESSES, "ready")
    assert living(store) == before
    assert serve.client.delete("/jobs/stub?wait=false").status_code == 202
    serve.kill()
    assert store.get("stub").phase == "stopping"
    assert living(store)
    serve.start()
    assert serve.adopted("stub")["text"].startswith("its stop goes on under pid")
    until("it has stopped", lambda: serve.get("/jobs/stub")["phase"] == "stopped")
    assert living(store) == set()
    job = store.get("stub")
    assert {status.exit_code for status in backend.poll(job.run, job.records).values()} == {-signal.SIGKILL}


@pytest.fixture
def _has_a_terminal() -> Iterator[None]:
    """Who runs these tests may ignore what comes of its end, and a child inherits that."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


@pytest.mark.usefixtures("_has_a_terminal")
def test_a_terminal_that_is_closed_ends_it_as_it_should(serve: Serve) -> None:
    serve.start()
    assert (serve.home / "control-plane.json").exists()
    assert serve.end(signal.SIGHUP) == -signal.SIGTERM
    assert not (serve.home / "control-plane.json").exists()
    assert "Traceback" not in (serve.home / "serve.log").read_text()


def test_told_to_end_it_ends_its_streams_and_a_second_one_is_refused(
    serve: Serve, store: JobStore, tmp_path: Path
) -> None:
    job = record(store, stub_plan(serve.home, "stub", free_ports(3)))
    store.set_phase("stub", job.run_id, "stopped", "", time.time())
    serve.start()
    second = subprocess.run(serve.command, env=serve.environment, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert serve.process is not None
    assert f"another control plane (pid {serve.process.pid}) runs on {serve.home}" in second.stderr.replace("\n", " ")
    elsewhere = {**serve.environment, "HEADRACE_HOME": str(tmp_path / "elsewhere")}
    third = subprocess.run(serve.command, env=elsewhere, capture_output=True, text=True, check=False)
    assert (third.returncode, third.stderr.count("\n")) == (1, 1)
    assert "another program listens there: end it, or give this one another --port" in third.stderr
    assert (
        "the variable HEADRACE_API_TOKEN of `headrace serve`"
        in serve.client.get("/jobs", headers={"authorization": ""}).text
    )
    with serve.client.stream("GET", "/events/stream?since=0") as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("id: ")
        serve.process.terminate()
        assert [line for line in lines if line.startswith("data: ")] != []
    serve.process.wait(WAIT_S)
    assert "Traceback" not in (serve.home / "serve.log").read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_it_waits_for_no_call_that_takes_long(serve: Serve, store: JobStore, sent: signal.Signals) -> None:
    backend = LocalBackend()
    plan = stub_plan(serve.home, "stub", free_ports(3), "--ignore-term", stop_grace_s=10 * WAIT_S)
    job = run(store, backend, plan)
    quick = "from orchestrator import cli, cli_serve; cli_serve.LAST_REPLIES_S = 1; cli.main()"
    serve.command[1:3] = ["-c", quick]
    serve.start()
    control = HttpControlPlane(str(serve.client.base_url), "secret", is_local=True)
    with ThreadPoolExecutor(1) as beside:
        stopping = beside.submit(control.stop, "stub", lambda _text: None)
        until("it stops", lambda: store.get("stub").phase == "stopping")
        serve.end(sent)
        with pytest.raises(ProblemAnswered, match="ends before this is done.*may go on") as unanswered:
            stopping.result()
    assert exit_code_of(unanswered.value) == ExitCode.NO_ANSWER
    assert backend.stop(job.run, job.records, 0.0) == ()
    assert "Traceback" not in (serve.home / "serve.log").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killed_at_random_twenty_times(serve: Serve, store: JobStore) -> None:
    """Whatever was asked for is so in the end, and nothing is left or there twice."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(20):
        record(store, stub_plan(serve.home, "stub", free_ports(3), silent="router", stop_grace_s=1))
        serve.start()
        time.sleep(chance.uniform(0, 1.5))
        serve.kill()
        serve.start()
        until("all processes run", lambda: len(living(store)) == 3)
        assert serve.client.delete("/jobs/stub?wait=false").status_code == 202
        time.sleep(chance.uniform(0, 0.5))
        serve.kill()
        serve.start()
        until("it has stopped", lambda: serve.get("/jobs/stub")["phase"] == "stopped")
        assert living(store) == set()
        serve.kill()
