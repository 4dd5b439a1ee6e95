"""`make bench-state`: how long `headrace serve` takes with much on record: 200 jobs, 50 of which run, 1,000,000 events.

The list of jobs, one job and a page of events over HTTP; and, after a kill, how long the next `headrace serve` takes
from its start until it has adopted the running jobs. Their processes are real and compute nothing. Figures are printed
with what they should be and nothing fails because of them; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deploy.local.backend import LocalBackend
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobStore
from tests.benchmarks.figures import Figure, Goal, percentile, result_line
from tests.fakes.stub_job import PROCESSES, free_ports, record, run, stub_plan
from tests.integration.orchestrator.serve_process import LOOK_EVERY_S, Serve

JOBS, RUNNING, EVENTS = 200, 50, 1_000_000
ROUNDS, CALLS = 5, 60
ADOPTIONS = 3
SAID = "router (pid 4711) ended with exit code -9"
"""As long as events are."""


def _goal(key: str, title: str, limit: float, unit: str = "ms") -> Goal:
    return Goal(key=key, title=title, unit=unit, bound="at most", limit=limit, is_ratio=False)


CALL_GOALS = {
    what: (_goal(f"{what}_p50_ms", f"{title}: median", 50), _goal(f"{what}_p99_ms", f"{title}: 99 of 100", 50))
    for what, title in (
        ("list", "GET /jobs"),
        ("get", "GET /jobs/{name}, one that has ended"),
        ("get_running", "GET /jobs/{name}, one that runs: all its processes are probed"),
        ("events", "GET /jobs/{name}/events, a page of 100 somewhere"),
    )
}
ADOPTION = _goal("adoption_s", "from the start of the program until all running jobs are adopted", 5, unit="s")
GOALS = (*itertools.chain.from_iterable(CALL_GOALS.values()), ADOPTION)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make bench-state", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--running", type=int, default=RUNNING, help="of them")
    parser.add_argument("--events", type=int, default=EVENTS)
    chosen = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bench-state-") as folder, _recorded(Path(folder), chosen) as names:
        serve = Serve(Path(folder))
        try:
            for figure in itertools.chain(
                _adoptions(serve, names[: chosen.running]), _calls(serve, names, chosen.running)
            ):
                print(f"\n{figure.report()}", flush=True)
                figures.append(figure)
        finally:
            serve.close()
    print(result_line(figures, GOALS))


@contextmanager
def _recorded(home: Path, chosen: argparse.Namespace) -> Iterator[list[str]]:
    """The names of the jobs; those that run come first."""
    database, backend = Database(home), LocalBackend()
    store = JobStore(database)
    names = [f"job-{index:03}" for index in range(chosen.jobs)]
    ports = free_ports(chosen.running * len(PROCESSES))
    try:
        for name in names[: chosen.running]:
            run(store, backend, stub_plan(home, name, [ports.pop() for _ in PROCESSES]))
        plan = stub_plan(home, "ended", range(1, 1 + len(PROCESSES)))
        for name in names[chosen.running :]:
            job = record(store, replace(plan, job=name))
            store.set_phase(name, job.run_id, "stopped", "", time.time())
        _add_events(database, chosen.jobs, chosen.events)
        size = (home / "headrace.db").stat().st_size / 1e6
        print(f"{len(names)} jobs, {chosen.running} running, {chosen.events} events: {size:.0f} MB", flush=True)
        yield names
    finally:
        for started in backend.alive([record for head in store.heads() for record in head.records]):
            os.kill(started.pid, signal.SIGKILL)


def _add_events(database: Database, jobs: int, events: int) -> None:
    with database.transaction() as connection:
        connection.execute(
            "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :events)"
            " INSERT INTO events (at, job, process, kind, text, data) SELECT :now, printf('job-%03d', n % :jobs),"
            " 'router', 'process_ended', :text, '{\"pid\": 4711, \"exit_code\": -9}' FROM numbers",
            {"events": events, "jobs": jobs, "now": time.time(), "text": SAID},
        )


def _adoptions(serve: Serve, names: Sequence[str]) -> Iterator[Figure]:
    took, cpu = [], []
    serve.start()
    for _ in range(ADOPTIONS):
        cursor, adopted = int(serve.get("/events?limit=1")["next"]), set[str]()
        serve.kill()
        began = time.monotonic()
        serve.start()
        assert serve.process is not None
        pid = serve.process.pid
        while len(adopted) < len(names):
            page = serve.get(f"/events?since={cursor}&limit=1000")
            cursor = page["next"]
            found = [event for event in page["events"] if event["kind"] == "job_adopted"]
            adopted.update(event["job"] for event in found if event["data"]["pid"] == pid)
            time.sleep(LOOK_EVERY_S)
        took.append(time.monotonic() - began)
        cpu.append(f"{_cpu_s(pid):.1f} s")
    yield Figure(goal=ADOPTION, ours=took, peer=(), notes=[f"CPU that the program took for it: {', '.join(cpu)}"])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _calls(serve: Serve, names: Sequence[str], running: int) -> Iterator[Figure]:
    chance = random.Random(0)
    ended = names[running:]
    newest = serve.get("/events?limit=1")["next"]
    paths: dict[str, Callable[[], str]] = {
        "list": lambda: "/jobs",
        "get": lambda: f"/jobs/{chance.choice(ended)}",
        "get_running": lambda: f"/jobs/{chance.choice(names[:running])}",
        "events": lambda: f"/jobs/{chance.choice(names)}/events?since={chance.randrange(newest)}",
    }
    for what, path in paths.items():
        rounds = [[_timed_ms(serve, path()) for _ in range(CALLS)] for _ in range(ROUNDS)]
        for goal, percent in zip(CALL_GOALS[what], (50, 99), strict=True):
            yield Figure(goal=goal, ours=[percentile(values, percent) for values in rounds], peer=())


def _timed_ms(serve: Serve, path: str) -> float:
    began = time.perf_counter()
    serve.get(path)
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
