"""Sets up a clone: `.venv` with Headrace in it, the CPU engine stack, system libraries, the demo's model.

Run by the system's own Python, so it uses the standard library alone and imports nothing of ours. `make setup` and
`make stack` call it. Each step leaves a stamp in `.venv/.headrace` that holds a hash of what the step was made from:
an unchanged step is not done again, and a run that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMPS = VENV / ".headrace"
LOGS = ROOT / ".cache" / "setup"
STACK_LIST = Path("deploy/local/cpu-stack.txt")

OLDEST_PYTHON = (3, 11)
MACHINES = ("x86_64", "aarch64")
BASE_GB, STACK_GB, UNPACKING_GB = 1, 6, 2
HEARTBEAT_S = 20.0
TAIL_LINES = 15

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
}
"""What Mooncake's programs load, even for tcp, and the Debian packages that have it."""

OFFERED = {
    "prometheus": "no Prometheus; jobs with monitoring and its tests will not run",
    "chromium": "no Chromium; the tests of the web page will not run",
}
"""Programs, which are Debian packages of the same name, and what their absence means. It stops nothing."""

HINTS = (
    (r"No space left on device", "The disk is full: free space, or let TMPDIR and PIP_CACHE_DIR name another one."),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure (in name resolution|resolving)"
        r"|Network is unreachable|ConnectTimeout|ProxyError|Could not connect",
        "The network did not answer: check it, and what `pip config list` and apt say about proxies and indexes.",
    ),
    (
        r"No matching distribution found|is not a supported wheel",
        f"A pinned release has no build for Python {platform.python_version()} on {platform.machine()}: "
        "README.md says which versions are known to work.",
    ),
)
"""What the end of a log can say, and what to do about it. The first that fits is shown."""


class SetupError(Exception):
    """The setup cannot go on. The text says why and what mends it."""


@dataclass(frozen=True)
class Step:
    """Something to be done once for each state of its inputs."""

    name: str
    """Of its stamp and its log."""
    title: str
    inputs: Sequence[str]
    commands: Sequence[Sequence[str]]
    result: Path
    """There when the step was done; looked for in case somebody removed it."""

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join(self.inputs).encode()).hexdigest()

    @property
    def done(self) -> bool:
        stamp = STAMPS / self.name
        return self.result.exists() and stamp.is_file() and stamp.read_text() == self.key

    def stamp(self) -> None:
        partial = STAMPS / f"{self.name}.partial"
        partial.write_text(self.key)
        partial.replace(STAMPS / self.name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Sets up this clone of Headrace in .venv.")
    parser.add_argument("--stack", action="store_true", help="the engine stack for a CPU and its system libraries")
    parser.add_argument("--dev", action="store_true", help="what the tests and linters need")
    parser.add_argument("--model", type=Path, metavar="PATH", help="make the demo's model there (needs --stack)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(stack=arguments.stack, dev=arguments.dev, model=arguments.model)
    except SetupError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nsetup: stopped; run it again to go on\n")
        return 130
    return 0


def set_up(*, stack: bool, dev: bool, model: Path | None) -> None:
    check_machine()
    with one_at_a_time() as lock:
        began = time.monotonic()
        steps = planned_steps(stack=stack, dev=dev, model=model)
        waiting = [step for step in steps if not step.done]
        if waiting:
            check_disk(STACK_GB if "stack" in {step.name for step in waiting} else BASE_GB)
        if missing := missing_packages(stack=stack, venv=any(step.name == "venv" for step in waiting)):
            install_debian(missing)
        if stack and (offered := [program for program in OFFERED if shutil.which(program) is None]):
            offer(offered)
        for step in waiting:
            do_step(step, lock)
        took = f"set up in {time.monotonic() - began:.0f} s" if waiting else "already set up, nothing to do"
        say(f"{VENV}: {took}")


# -- what is needed ----------------------------------------------------------------------------------------------


def check_machine() -> None:
    if sys.version_info[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"this is Python {platform.python_version()} ({sys.executable}); Headrace needs {wanted} or newer. "
            f"Name another one: make PYTHON=python{wanted} ..."
        )
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise SetupError(
            f"this is {platform.system()} on {platform.machine()}; Headrace runs on Linux on {' or '.join(MACHINES)}"
        )


def check_disk(needed_gb: int) -> None:
    wanted = {ROOT: needed_gb}
    scratch = Path(tempfile.gettempdir())
    if needed_gb == STACK_GB and scratch.stat().st_dev != ROOT.stat().st_dev:
        wanted[scratch] = UNPACKING_GB
    for folder, gigabytes in wanted.items():
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < gigabytes:
            raise SetupError(f"{folder} has {free_gb:.1f} GB free, about {gigabytes} GB are needed; free some space")


def missing_packages(*, stack: bool, venv: bool) -> list[str]:
    """Debian packages that have to be installed first."""
    missing = [package for library, package in LIBRARIES.items() if not loads(library)] if stack else []
    if venv and (importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None):
        missing.append("python3-venv")
    return missing


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def base_python() -> str:
    """The interpreter that `.venv` is made from; ours may be that of `.venv` itself."""
    if sys.prefix == sys.base_prefix:
        return sys.executable
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


def planned_steps(*, stack: bool, dev: bool, model: Path | None) -> list[Step]:
    """The steps in their order, done or not."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    place = [version, str(VENV)]
    python = str(VENV_PYTHON)
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    stack_list = str(STACK_LIST)
    stack_text = (ROOT / STACK_LIST).read_text()
    steps = [Step("venv", f"virtual environment (Python {version})", place, venv_commands(version), VENV_PYTHON)]
    if stack:
        torch = next(line for line in stack_text.splitlines() if line.startswith("torch=="))
        look = "import torch, vllm, nixl, mooncake.store"
        commands = [
            # Not without its dependencies: a CUDA build of torch cannot be imported without its libraries.
            [*pip, "-c", stack_list, torch],
            [*pip, "--no-deps", "-r", stack_list],
            [python, "-c", look],
        ]
        title = "engine stack (vLLM, NIXL, Mooncake; a few minutes)"
        steps.append(Step("stack", title, [*place, stack_text], commands, VENV_PYTHON))
    project = (ROOT / "pyproject.toml").read_text()
    with_dev = package_step([*place, project, stack_text], pip, dev=True)
    if dev or with_dev.done:
        steps.append(with_dev)
    else:
        steps.append(package_step([*place, project, stack_text], pip, dev=False))
    if model is not None:
        config = (ROOT / model / "config.json").resolve()
        commands = [[python, "deploy/local/demo_model.py", str(model)]]
        steps.append(Step("model", f"model {model.name}", [*place, str(config)], commands, config))
    return steps


def venv_commands(version: str) -> list[list[str]]:
    """How to make `.venv`: over what a killed run left, or anew where another Python or another folder made it.

    Raises:
        SetupError: somebody made it for another Python.
    """
    stamped = (STAMPS / "venv").is_file()
    found = VENV / "pyvenv.cfg"
    made_by = re.search(r"(?m)^version\s*=\s*(\d+\.\d+)", found.read_text()) if found.is_file() else None
    if not stamped and not STAMPS.is_dir() and made_by and made_by[1] != version:
        raise SetupError(f"{VENV} is there for Python {made_by[1]}, and this is {version}; remove it or use that one")
    return [
        [base_python(), "-m", "venv", *(["--clear"] if stamped else []), str(VENV)],
        [str(VENV_PYTHON), "-m", "pip", "--version"],
    ]


def package_step(inputs: Sequence[str], pip: Sequence[str], *, dev: bool) -> Step:
    name, target, title = ("package-dev", ".[dev]", " and its tools") if dev else ("package", ".", "")
    command = [*pip, "-c", str(STACK_LIST), "-e", target]
    return Step(name, f"Headrace{title}", [*inputs, target], [command], VENV / "bin" / "headrace")


# -- doing it ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_at_a_time() -> Iterator[int]:
    """Holds the clone's setup lock. Children inherit it: what a killed run left working is waited for."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another setup of this clone to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def do_step(step: Step, lock: int) -> None:
    if step.name != "model":
        remove_half_installed()
    run_logged(step.title, step.commands, LOGS / f"{step.name}.log", inherit=(lock,))
    STAMPS.mkdir(exist_ok=True)
    step.stamp()


def remove_half_installed() -> None:
    """Makes pip install again what it was killed in: it goes by the metadata, and writes INSTALLER last but one."""
    for site in VENV.glob("lib/python3*/site-packages"):
        for metadata in site.glob("*.dist-info"):
            if not (metadata / "INSTALLER").exists():
                shutil.rmtree(metadata)
        for moved_aside in site.glob("~*"):
            shutil.rmtree(moved_aside) if moved_aside.is_dir() else moved_aside.unlink()


def install_debian(packages: Sequence[str]) -> None:
    """
    Raises:
        SetupError: with the command that an administrator has to run.
    """
    command = f"apt-get install -y --no-install-recommends {shlex.join(packages)}"
    become = administrator()
    if become is None or shutil.which("apt-get") is None:
        raise SetupError(f"system packages are missing; install them and run this again (Debian): sudo {command}")
    apt = [*become, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=120"]
    commands = [[*apt, "update"], [*apt, *command.split()[1:]]]
    run_logged(f"system packages ({' '.join(packages)})", commands, LOGS / "system.log")


def offer(programs: Sequence[str]) -> None:
    try:
        install_debian(programs)
    except SetupError as error:
        say(f"warning: {'; '.join(OFFERED[program] for program in programs)}. {error}")


def administrator() -> list[str] | None:
    """What to put before a command that needs root; None where that cannot be had without asking."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo is None or subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode != 0:
        return None
    return [sudo, "-n"]


def run_logged(title: str, commands: Sequence[Sequence[str]], log: Path, *, inherit: Sequence[int] = ()) -> None:
    """Runs the commands one after the other, output to `log`, and shows that they are running.

    Raises:
        SetupError: one failed; with the end of the log.
    """
    display = Display(title, log)
    with log.open("wb") as output:
        for command in commands:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            with subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=inherit
            ) as process:
                code = wait_for(process, display)
            if code != 0:
                display.end("failed")
                raise SetupError(failure_text(title, code, log))
    display.end("done")


def wait_for(process: subprocess.Popen[bytes], display: Display) -> int:
    try:
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                display.tick()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def failure_text(title: str, code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    end = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
    text = "\n".join(lines[-200:])
    hint = next((mend for pattern, mend in HINTS if re.search(pattern, text)), "")
    return f"{title}: failed with exit code {code}. The end of {log}:\n{end}" + (f"\n  {hint}" if hint else "")


class Display:
    """One line about a running step: renewed in place on a terminal, repeated now and then elsewhere."""

    def __init__(self, title: str, log: Path) -> None:
        self._title, self._log = title, log
        self._began = self._shown = time.monotonic()
        self._live = sys.stdout.isatty()
        if not self._live:
            say(f"{title} ...")

    def tick(self) -> None:
        now = time.monotonic()
        if not self._live and now - self._shown < HEARTBEAT_S:
            return
        self._shown = now
        line = f"{self._title}  {now - self._began:.0f} s  {last_line(self._log)}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write(f"\r\x1b[2K{line[:width]}")
            sys.stdout.flush()
        else:
            say(line[:150])

    def end(self, outcome: str) -> None:
        if self._live:
            sys.stdout.write("\r\x1b[2K")
        say(f"{self._title}: {outcome} after {time.monotonic() - self._began:.0f} s")


def last_line(log: Path) -> str:
    """What the step is doing: its last line that is no warning."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        lines = [line.strip() for line in file.read().decode(errors="replace").split("\n")]
    return next((line for line in reversed(lines) if line and not line.startswith("WARNING")), "")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
