"""The parts of the benchmark: each starts what it needs, runs its rounds and returns figures.

`bench_router.py` runs them one after the other. In each round both routers are measured, one right after the other, and
the next round begins with the other one, so that a machine that slows down or speeds up favours neither.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import uvloop

from tests.benchmarks.figures import Figure, goal_of, percentile
from tests.benchmarks.idle_sessions import measure_idle_sessions
from tests.benchmarks.paced_load import paced_load, saturation_rate
from tests.benchmarks.pick import measure_pick
from tests.benchmarks.processes import CpuMeter
from tests.benchmarks.routers import CONTESTANTS, Contestant, Router, running
from tests.benchmarks.streams import STREAMS, TOKENS_PER_S, measure_streams
from tests.benchmarks.stubs import Legs, Stubs, stub_engines
from tests.benchmarks.workload import CONNECTIONS, SESSIONS, SIZES, Size, completion_body, http_request, session_ids
from tests.benchmarks.wrk import WrkResult, run_wrk

WARM_S = 1.0
SETTLE_S = 0.3
"""After wrk has left: the router may still be at work on the requests that were open."""
MEMORY_ROUNDS = 3
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    rounds: int
    seconds: float
    """Of each timed window."""
    idle_sessions: int
    folder: Path
    """For configs, bodies and logs."""
    settings: Mapping[str, Any]
    """Fields of our router's settings that differ from their defaults."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """One router under wrk for one window."""

    wrk: WrkResult
    legs: Legs
    cpu_s: float
    stubs_cpu_s: float

    @property
    def cpu_us(self) -> float:
        """Per pair of legs: wrk does not count the last requests, in the midst of which it leaves."""
        return self.cpu_s / (self.legs.prefill + self.legs.decode) * 2e6

    @property
    def rps(self) -> float:
        return self.wrk.requests / self.wrk.duration_s


def measure_throughput(scale: Scale) -> list[Figure]:
    """CPU per request and requests per second, for both body sizes."""
    windows: dict[tuple[Contestant, str], list[_Window]] = {}
    with stub_engines(scale.folder) as stubs, ExitStack() as stack:
        routers = _start_both(stack, stubs, scale)
        for size in SIZES:
            body_file = scale.folder / f"body-{size.name}.json"
            body_file.write_bytes(completion_body(size.token_ids))
            for number, order in _rounds(scale.rounds):
                for each in order:
                    window = _window(routers[each], stubs, body_file, scale.seconds)
                    windows.setdefault((each, size.name), []).append(window)
                    say(f"  {size.name} round {number} {each}: {window.cpu_us:.0f} us, {window.rps:.0f} requests/s")
    return [figure for size in SIZES for figure in _throughput_figures(size, windows)]


def _window(router: Router, stubs: Stubs, body_file: Path, seconds: float) -> _Window:
    run_wrk(router.port, body_file, WARM_S)
    time.sleep(SETTLE_S)
    before, meter = stubs.legs(), CpuMeter(router.process.pid)
    stub_meters = [CpuMeter(process.pid) for process in stubs.processes.values()]
    result = run_wrk(router.port, body_file, seconds)
    time.sleep(SETTLE_S)
    return _Window(
        wrk=result,
        legs=stubs.legs_since(before, result.requests, in_flight=CONNECTIONS),
        cpu_s=meter.used_s(),
        stubs_cpu_s=sum(each.used_s() for each in stub_meters),
    )


def _throughput_figures(size: Size, windows: Mapping[tuple[Contestant, str], list[_Window]]) -> list[Figure]:
    ours, peer = windows["ours", size.name], windows["peer", size.name]
    notes = [_throughput_note("ours", ours), _throughput_note("peer", peer)]
    cpu_goal = goal_of("cpu_ratio_3k7" if size.name == "3k7" else "cpu_ratio_116k")
    rps_goal = goal_of("rps_ratio_3k7" if size.name == "3k7" else "rps_ratio_116k")
    return [
        Figure(goal=cpu_goal, ours=[each.cpu_us for each in ours], peer=[each.cpu_us for each in peer]),
        Figure(goal=rps_goal, ours=[each.rps for each in ours], peer=[each.rps for each in peer], notes=notes),
    ]


def _throughput_note(contestant: Contestant, windows: list[_Window]) -> str:
    p50, p99 = (median(getattr(each.wrk, name) for each in windows) for name in ("p50_ms", "p99_ms"))
    cores = median(each.cpu_s / each.wrk.duration_s for each in windows)
    stubs = median(each.stubs_cpu_s / each.wrk.duration_s for each in windows)
    return f"{contestant}: p50 {p50:.3g} ms, p99 {p99:.3g} ms, router on {cores:.2f} cores, stub engines on {stubs:.2f}"


def measure_latency(scale: Scale) -> list[Figure]:
    """p99 of both routers at the rate at which the peer is saturated, found anew in each round."""
    body = completion_body(SIZES[0].token_ids)
    requests = [http_request(body, session) for session in session_ids(SESSIONS)]
    latencies: dict[Contestant, list[float]] = {each: [] for each in CONTESTANTS}
    rates, unanswered = [], dict.fromkeys(CONTESTANTS, 0)
    with stub_engines(scale.folder) as stubs, ExitStack() as stack:
        routers = _start_both(stack, stubs, scale)
        for number, order in _rounds(scale.rounds):
            rate = _await(saturation_rate(routers["peer"].port, requests, warm_s=WARM_S, seconds=scale.seconds / 2))
            rates.append(rate)
            for each in order:
                paced = _await(
                    paced_load(routers[each].port, requests, rate=rate, warm_s=WARM_S, seconds=scale.seconds)
                )
                latencies[each].append(percentile(paced.latencies_s, 99) * 1e3)
                unanswered[each] += paced.unanswered
                say(f"  p99 round {number} {each}: {latencies[each][-1]:.1f} ms at {rate:.0f} requests/s")
    notes = [
        f"open loop at the peer's saturation rate, median {median(rates):.0f} requests/s; latency counts from when a "
        "request fell due",
        f"given up, counted with the time waited: ours {unanswered['ours']}, peer {unanswered['peer']}",
    ]
    return [Figure(goal=goal_of("p99_ratio"), ours=latencies["ours"], peer=latencies["peer"], notes=notes)]


def measure_streaming(scale: Scale) -> list[Figure]:
    """CPU per relayed token."""
    cpu: dict[Contestant, list[float]] = {each: [] for each in CONTESTANTS}
    rates: dict[Contestant, list[float]] = {each: [] for each in CONTESTANTS}
    with stub_engines(scale.folder, step_s=1 / TOKENS_PER_S) as stubs, ExitStack() as stack:
        routers = _start_both(stack, stubs, scale)
        for number, order in _rounds(scale.rounds):
            for each in order:
                streamed = _await(measure_streams(routers[each], seconds=scale.seconds))
                cpu[each].append(streamed.cpu_us_per_token)
                rates[each].append(streamed.tokens_per_s)
                say(f"  streams round {number} {each}: {cpu[each][-1]:.1f} us, {rates[each][-1]:.0f} tokens/s")
    notes = [
        f"tokens/s relayed, {STREAMS * TOKENS_PER_S:.0f} asked for: "
        + ", ".join(f"{each} {median(rates[each]):.0f}" for each in CONTESTANTS)
    ]
    return [Figure(goal=goal_of("sse_cpu_ratio"), ours=cpu["ours"], peer=cpu["peer"], notes=notes)]


def measure_idle(scale: Scale) -> list[Figure]:
    """Memory of idle sessions; a fresh router for each round, and few rounds, since memory hardly varies."""
    both: dict[Contestant, list[float]] = {each: [] for each in CONTESTANTS}
    sessions: dict[Contestant, list[float]] = {each: [] for each in CONTESTANTS}
    with stub_engines(scale.folder) as stubs:
        for number, order in _rounds(min(scale.rounds, MEMORY_ROUNDS)):
            for each in order:
                with running(each, stubs, scale.folder, scale.settings) as router:
                    cost = _await(measure_idle_sessions(router, sessions=scale.idle_sessions))
                both[each].append(cost.both_mb)
                sessions[each].append(cost.sessions_mb)
                say(f"  idle round {number} {each}: {cost.both_mb:.1f} MB, sessions alone {cost.sessions_mb:.1f} MB")
    notes = [
        f"{scale.idle_sessions} sessions; growth of resident memory since the warm-up",
        "sessions alone, MB: " + ", ".join(f"{each} {median(sessions[each]):.3g}" for each in CONTESTANTS),
    ]
    return [Figure(goal=goal_of("idle_sessions_mb"), ours=both["ours"], peer=both["peer"], notes=notes)]


def measure_choice(scale: Scale) -> list[Figure]:
    """Our own index alone: the peer's can't be called from outside."""
    cost = measure_pick(scale.rounds)
    notes = [
        "a new session's leg, reservation included",
        f"a session that is pinned already: median {median(cost.pinned_us):.3g} us",
    ]
    return [Figure(goal=goal_of("pick_us"), ours=cost.new_session_us, peer=[], notes=notes)]


def say(text: str) -> None:
    print(text, flush=True)


def _start_both(stack: ExitStack, stubs: Stubs, scale: Scale) -> dict[Contestant, Router]:
    return {each: stack.enter_context(running(each, stubs, scale.folder, scale.settings)) for each in CONTESTANTS}


def _rounds(count: int) -> Iterator[tuple[int, tuple[Contestant, ...]]]:
    for number in range(1, count + 1):
        yield number, CONTESTANTS if number % 2 else CONTESTANTS[::-1]


def _await(load: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(load)
