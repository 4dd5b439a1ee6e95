"""Where our router's time goes under a 3.7 kB load: by shared object as perf samples it, by module as cProfile does.

`bench_router.py` prints it after the figures, none of which is taken from the runs made here. perf shows true shares,
but all Python code as one; cProfile tells the modules apart, but slows calls down, so that many small ones look
dearer.
"""

from __future__ import annotations

import pstats
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from tests.benchmarks.parts import Scale, say
from tests.benchmarks.processes import ROOT
from tests.benchmarks.routers import Router, running
from tests.benchmarks.stubs import Stubs, stub_engines
from tests.benchmarks.workload import SIZES, completion_body
from tests.benchmarks.wrk import run_wrk

ROWS = 14
PACKAGE = re.compile(r"(?:site|dist)-packages/([^/.]+)")
OWNER_OF_BUILTIN = re.compile(r"(?:of '|built-in method )([a-z_]+)\.")
Function = tuple[str, int, str]
"""(file, line, name) as cProfile keys it; the file of a builtin is "~"."""


def time_report(scale: Scale) -> str:
    say("profile ...")
    # In one process, where all of it can be seen.
    scale = replace(scale, settings={**scale.settings, "workers": 1})
    body_file = scale.folder / "body-profile.json"
    body_file.write_bytes(completion_body(SIZES[0].token_ids))
    with stub_engines(scale.folder) as stubs:
        sampled = _sampled(scale, stubs, body_file)
        start = _profiled(scale, stubs, lambda _port: None)
        whole = _profiled(scale, stubs, lambda port: run_wrk(port, body_file, scale.seconds))
    times = {function: max(0.0, seconds - start.get(function, 0.0)) for function, seconds in whole.items()}
    by_module: defaultdict[str, float] = defaultdict(float)
    by_function: defaultdict[str, float] = defaultdict(float)
    for function, seconds in times.items():
        by_module[module_of(function)] += seconds
        by_function[f"{module_of(function)} {function[2]}"] += seconds
    return "\n".join(
        [
            "Where our router's time goes, 3.7 kB bodies",
            "  by shared object (perf samples):",
            *sampled,
            "  by module (cProfile, own time, less that of a router that is only started and stopped; uvloop with its",
            "  system calls and its waiting stands in the row of the function that runs it, asyncio/runners.py):",
            *shares(by_module),
            "  by function (cProfile, own time):",
            *shares(by_function),
        ]
    )


def _sampled(scale: Scale, stubs: Stubs, body_file: Path) -> list[str]:
    if shutil.which("perf") is None:
        return ["    perf is not installed"]
    with running("ours", stubs, scale.folder, scale.settings) as router:
        run_wrk(router.port, body_file, 1.0)
        return _perf(router, scale, body_file)


def _perf(router: Router, scale: Scale, body_file: Path) -> list[str]:
    data = scale.folder / "perf.data"
    record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "499", "-p", str(router.process.pid), "-o", str(data)]
    with subprocess.Popen(record, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recorder:
        try:
            run_wrk(router.port, body_file, scale.seconds)
        finally:
            recorder.terminate()
            _, said = recorder.communicate()
    report = ["perf", "report", "--stdio", "-q", "--sort", "dso", "--percent-limit", "1", "-i", str(data)]
    shown = subprocess.run(report, capture_output=True, text=True, check=False)
    rows = [f"    {line.strip()}" for line in shown.stdout.splitlines() if line.strip()]
    return rows or [f"    perf could not sample: {said.decode(errors='replace').strip()}"]


def _profiled(scale: Scale, stubs: Stubs, load: Callable[[int], object]) -> dict[Function, float]:
    """Seconds that our router spends in each function itself, from its start to its end."""
    profile = scale.folder / "router.profile"
    with running("ours", stubs, scale.folder, scale.settings, profile=profile) as router:
        load(router.port)
    # The router writes it when it ends.
    stats = pstats.Stats(str(profile))
    raw = cast(Mapping[Function, tuple[int, int, float, float, object]], vars(stats)["stats"])
    return {function: entry[2] for function, entry in raw.items()}


def module_of(function: Function) -> str:
    """A module of ours, a package of others, or what a builtin belongs to."""
    file, _, name = function
    if file == "~":
        owner = OWNER_OF_BUILTIN.search(name)
        return owner[1] if owner else "builtins"
    if package := PACKAGE.search(file):
        return package[1]
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f"Python's {path.parent.name}/{path.name}"


def shares(times: Mapping[str, float]) -> list[str]:
    total = sum(times.values())
    ranked = sorted(times.items(), key=lambda item: item[1], reverse=True)
    return [f"    {seconds / total:6.1%}  {name}" for name, seconds in ranked[:ROWS]]
