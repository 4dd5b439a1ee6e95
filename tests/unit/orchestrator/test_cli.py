"""The `headrace` command as a user meets it: its output and its exit code."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.store.events import Event
from tests.fakes.fake_launch import FakeFleet

JOB = """
name = "demo"
[model]
path = "{model}"
[engine]
block_size = 32
[kv_offload]
type = "mooncake"
cpu.num_bytes = "64MiB"
[roles.prefill]
[roles.decode]
kv_offload.cpu.num_bytes = 0
[monitoring]
enabled = false
"""


@dataclass(frozen=True, kw_only=True)
class Said:
    stdout: str
    stderr: str


class Cli:
    """Runs the command: as a process where it must be one, else in this one, which is a second faster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.command = [sys.executable, "-m", "orchestrator.cli"]
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("HEADRACE_HOME", str(self.home))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        monkeypatch.delenv("HEADRACE_API_TOKEN", raising=False)
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str, code: int) -> Said:
        """It must end with `code`, and where it fails it says why; errors go to stderr alone."""
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = self._capsys.readouterr()
        assert end.value.code == code, captured
        if code and not captured.out:
            assert captured.err
        return Said(stdout=captured.out, stderr=captured.err)

    def job(self, text: str = JOB) -> str:
        model = self.folder / "model"
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        (self.folder / "job.toml").write_text(text.format(model=model))
        return "job.toml"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    handlers = {sent: signal.getsignal(sent) for sent in (signal.SIGTERM, signal.SIGHUP)}
    yield Cli(tmp_path, monkeypatch, capsys)
    for sent, handler in handlers.items():
        signal.signal(sent, handler)


def render(cli: Cli, job: str, *more: str) -> subprocess.CompletedProcess[bytes]:
    """No engine stack is needed for a look; where it is missing, that is an error of the plan, which is shown."""
    return subprocess.run([*cli.command, "render", job, *more], capture_output=True, timeout=30, check=False)


def test_rendering_twice_gives_identical_bytes(cli: Cli) -> None:
    job = cli.job()
    first, second = render(cli, job), render(cli, job)
    assert first.stdout == second.stdout
    for shown in (b"# mooncake-master on ", b"--kv-transfer-config", b"inference-prefill.json", b"router"):
        assert shown in first.stdout
    assert not (cli.home / "jobs").exists()


def test_rendering_as_json_and_with_set(cli: Cli) -> None:
    """What is set is stronger than the file. The exit code says whether the plan could be started."""
    done = render(cli, cli.job(), "--json", "--set", "router.port=18999", "--set", "engine.block_size=64")
    plan = json.loads(done.stdout)
    assert plan["router"]["url"].endswith(":18999")
    argv = next(unit["argv"] for unit in plan["units"] if unit["name"] == "prefill-0")
    assert argv[argv.index("--block-size") + 1] == "64"
    assert done.returncode == (1 if any(one["severity"] == "error" for one in plan["findings"]) else 0)


def test_mistakes_in_a_job_file(cli: Cli) -> None:
    unknown = cli("render", cli.job(JOB.replace("[engine]", "[engin]")), code=1)
    assert "engin" in unknown.stderr
    assert "engine" in unknown.stderr
    assert unknown.stdout == ""
    assert "no-such.toml" in cli("render", "no-such.toml", code=1).stderr
    assert "nonsense" in cli("render", "job.toml", "--set", "nonsense", code=1).stderr


def test_what_keeps_a_plan_from_being_started_stands_at_its_end(cli: Cli) -> None:
    too_much = cli("render", cli.job(), "--set", "kv_offload.cpu.num_bytes='1000TiB'", code=1)
    assert "kv_offload.cpu.num_bytes: " in too_much.stderr
    assert "# prefill-0 on " in too_much.stdout


def test_wrong_use(cli: Cli) -> None:
    assert "No such command" in cli("rendr", code=2).stderr
    assert "Missing argument" in cli("render", code=2).stderr


def test_no_job_yet(cli: Cli) -> None:
    assert "no job is recorded" in cli("status", code=0).stdout
    assert cli("events", code=0).stdout == ""
    for command in ("status", "down", "logs", "events"):
        assert "no job is called 'x'; recorded jobs: none" in cli(command, "x", code=1).stderr


@pytest.fixture
def stopped(cli: Cli) -> FakeFleet:
    """A job on record whose processes are gone, with their logs."""
    fleet = FakeFleet(cli.home)
    fleet.running()
    fleet.service().stop("demo")
    return fleet


def test_a_recorded_job(cli: Cli, stopped: FakeFleet) -> None:
    job = stopped.store.get("demo")
    shown = cli("status", code=0).stdout
    assert shown.startswith("demo  stopped  recorded ")
    assert f"files       {job.directory}" in shown.splitlines()
    assert json.loads(cli("status", "demo", "--json", code=0).stdout)["phase"] == "stopped"
    assert f"demo: stopped; logs stay in {job.run.log_dir}" in cli("down", "demo", code=0).stdout


def test_events(cli: Cli, stopped: FakeFleet) -> None:
    every = cli("events", "demo", code=0).stdout.splitlines()
    assert every[0].endswith("  demo  starting")
    assert every[-1].endswith("  demo  stopped")
    assert cli("events", "-n", "2", code=0).stdout.splitlines() == every[-2:]
    page = json.loads(cli("events", "demo", "--since", "1", "--json", code=0).stdout)
    assert [event["seq"] for event in page["events"]] == [*range(2, len(every) + 1)]
    assert page["next"] == len(every)


def test_events_are_followed(cli: Cli, stopped: FakeFleet) -> None:
    command = [*cli.command, "events", "demo", "-n", "1", "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["text"] == "stopped"
        stopped.store.events.note("demo", Event(kind="remark", text="new"))
        assert json.loads(following.stdout.readline())["text"] == "new"
        following.terminate()
        assert following.wait(20) == 130


def test_logs(cli: Cli, stopped: FakeFleet) -> None:
    assert cli("logs", "demo", "router", code=0).stdout == "first line\nlast line\n"
    assert cli("logs", "demo", "router", "-n", "1", code=0).stdout == "last line\n"
    every = cli("logs", "demo", code=0).stdout.splitlines()
    assert "router | last line" in every
    assert len(every) == 2 * len(stopped.plan().units)
    unknown = cli("logs", "demo", "ruter", code=1).stderr
    assert "no process 'ruter'; it has: mooncake-master," in unknown.replace("\n", " ")


def test_logs_of_a_job_that_never_started(cli: Cli) -> None:
    FakeFleet(cli.home).record()
    done = cli("logs", "demo", code=0)
    assert done.stdout == ""
    assert "nothing was started" in done.stderr


def test_an_audit_of_a_job_that_does_not_serve(cli: Cli, stopped: FakeFleet) -> None:
    assert "is stopped" in cli("audit", "demo", code=3).stderr
    assert "'nobody'" in cli("audit", "nobody", code=1).stderr


def test_a_state_folder_that_cannot_be_used(cli: Cli) -> None:
    cli.home.write_text("a file")
    said = cli("status", code=1).stderr
    assert str(cli.home) in said
    assert "HEADRACE_HOME" in said


def test_doctor_without_an_engine_stack(cli: Cli) -> None:
    said = cli("doctor", "--python", "/no/such/python", code=1).stdout
    assert "FAIL engine stack: " in said
    assert "mend: make stack" in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_said_and_is_130(cli: Cli, stopped: FakeFleet, sent: signal.Signals) -> None:
    # A shell's background job ignores Ctrl-C, and its children inherit that.
    command = ["env", "--default-signal=INT", *cli.command, "logs", "demo", "router", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert following.stdout.readline() == "first line\n"
        following.send_signal(sent)
        assert following.wait(20) == 130
        said = following.stderr.read()
    assert said == "interrupted; `headrace status` says whether anything is left\n"


def test_a_reader_that_leaves_is_no_error(cli: Cli, stopped: FakeFleet) -> None:
    log = stopped.store.get("demo").run.log_dir / "router.log"
    log.write_text("line\n" * 200_000)
    shell = f"{shlex.join(cli.command)} logs demo router -n 200000 | head -1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout == "line\n"
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["restart", "drain", "undrain"])
def test_a_replica_of_a_job_that_does_not_serve(cli: Cli, stopped: FakeFleet, command: str) -> None:
    assert "job 'demo' is stopped" in cli(command, "demo", "decode-0", code=1).stderr
