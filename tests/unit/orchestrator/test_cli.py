"""The `headrace` command as a user meets it: its output and its exit code."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.exit_codes import MEANINGS
from orchestrator.signals import ASKING
from orchestrator.store.events import Event
from tests.fakes.fake_launch import FakeFleet
from tests.unit.orchestrator.cli_runs import JOB, Cli


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    handlers = {sent: signal.getsignal(sent) for sent in ASKING}
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
    assert done.returncode == (2 if any(one["severity"] == "error" for one in plan["findings"]) else 0)


def test_mistakes_in_a_job_file(cli: Cli) -> None:
    unknown = cli("render", cli.job(JOB.replace("[engine]", "[engin]")), code=2)
    assert "engin" in unknown.stderr
    assert "engine" in unknown.stderr
    assert unknown.stdout == ""
    assert "no-such.toml" in cli("render", "no-such.toml", code=2).stderr
    assert "nonsense" in cli("render", "job.toml", "--set", "nonsense", code=2).stderr


def test_what_keeps_a_plan_from_being_started_stands_at_its_end(cli: Cli) -> None:
    too_much = cli("render", cli.job(), "--set", "kv_offload.cpu.num_bytes='1000TiB'", code=2)
    assert "kv_offload.cpu.num_bytes: " in too_much.stderr
    assert "# prefill-0 on " in too_much.stdout


def test_wrong_use(cli: Cli) -> None:
    assert "No such command" in cli("rendr", code=2).stderr
    assert "Missing argument" in cli("render", code=2).stderr


@pytest.mark.parametrize(
    "server",
    ["127.0.0.1:8700", "ftp://127.0.0.1", "http://127.0.0.1:abc", "http://a..b:1", f"http://{'a' * 64}", "http://"],
)
def test_a_server_that_is_no_url(cli: Cli, server: str) -> None:
    said = " ".join(cli("--server", server, "status", code=2).stderr.split())
    assert f"{server!r} is no URL of a `headrace serve`; give one such as http://127.0.0.1:8700" in said


def test_no_job_yet(cli: Cli) -> None:
    assert "no job is recorded" in cli("status", code=0).stdout
    assert cli("events", code=0).stdout == ""
    for command in ("status", "down", "logs", "events"):
        assert "no job is called 'x'; recorded jobs: none" in cli(command, "x", code=5).stderr


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
    assert f"demo: stopped; logs stay in {job.run.log_dir.parent}" in cli("down", "demo", code=0).stdout


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
    unknown = cli("logs", "demo", "ruter", code=5).stderr
    assert "no process 'ruter'; it has: mooncake-master," in unknown.replace("\n", " ")


def test_logs_of_a_job_that_never_started(cli: Cli) -> None:
    FakeFleet(cli.home).record()
    done = cli("logs", "demo", code=0)
    assert done.stdout == ""
    assert "nothing was started" in done.stderr


def test_an_audit_of_a_job_that_does_not_serve(cli: Cli, stopped: FakeFleet) -> None:
    assert "is stopped" in cli("audit", "demo", code=4).stderr
    assert "'nobody'" in cli("audit", "nobody", code=5).stderr


def test_a_state_folder_that_cannot_be_used(cli: Cli) -> None:
    cli.home.write_text("a file")
    said = cli("status", code=1).stderr
    assert str(cli.home) in said
    assert "HEADRACE_HOME" in said


def test_doctor_without_an_engine_stack(cli: Cli) -> None:
    said = cli("doctor", "--python", "/no/such/python", code=1).stdout
    assert "FAIL engine stack: " in said
    assert "mend: make stack" in said


def test_a_log_is_followed_until_the_job_has_ended(cli: Cli, stopped: FakeFleet) -> None:
    assert cli("logs", "demo", "router", "-f", "-n", "1", code=0).stdout == "last line\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_said_and_is_130(cli: Cli, sent: signal.Signals) -> None:
    FakeFleet(cli.home).running()
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


def test_an_interruption_of_a_program_that_still_loads_says_nothing_and_is_130(cli: Cli) -> None:
    interrupting = """
import sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "orchestrator.cli_common":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from orchestrator.__main__ import main
main()
"""
    done = subprocess.run([*cli.command[:1], "-c", interrupting, "status"], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_reader_that_leaves_is_no_error(cli: Cli, stopped: FakeFleet) -> None:
    log = stopped.store.get("demo").run.log_dir / "router.log"
    # More than a pipe holds.
    log.write_text(f"line{' ' * 100}\n" * 10_000)
    shell = f"{shlex.join(cli.command)} logs demo router -n 10000 | head -1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout.rstrip() == "line"
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["restart", "drain", "undrain"])
def test_a_replica_of_a_job_that_does_not_serve(cli: Cli, stopped: FakeFleet, command: str) -> None:
    assert "job 'demo' is stopped" in cli(command, "demo", "decode-0", code=4).stderr


def completed(cli: Cli, monkeypatch: pytest.MonkeyPatch, shell: str, *words: str) -> list[str]:
    monkeypatch.setenv("_HEADRACE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", " ".join(("headrace", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(("headrace", *words)))
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    said = cli(code=0).stdout
    return said.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_jobs_and_their_processes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, stopped: FakeFleet, shell: str
) -> None:
    units = stopped.store.get("demo").unit_names
    for words, expected in {
        ("down", "d"): ["demo"],
        ("weights", "push", "de"): ["demo"],
        ("logs", "demo", "r"): [name for name in units if name.startswith("r")],
        ("restart", "demo", "m"): ["mooncake-master"],
        ("drain", "demo", "p"): ["prefill-0"],
    }.items():
        said = " ".join(completed(cli, monkeypatch, shell, *words))
        assert all(name in said for name in expected), (words, said)
        assert "decode-0" not in said
    assert "demo" not in completed(cli, monkeypatch, shell, "--server", "http://127.0.0.1:1", "down", "d")


def test_a_completion_makes_no_state_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(cli, monkeypatch, "bash", "down", "d") == []
    assert not cli.home.exists()


def test_exit_codes_are_told_by_the_help_and_the_readme(cli: Cli) -> None:
    said = " ".join(cli("--help", code=0).stdout.split())
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    for code, meaning in MEANINGS.items():
        assert f"{code.value}: {meaning}" in said
        assert f"| {code.value} | {meaning} |" in readme
