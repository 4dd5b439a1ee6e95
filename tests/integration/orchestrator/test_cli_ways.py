"""Every command of `headrace`, answered from the state folder, by the `headrace serve` found on it, and by one that is
told: the same output, the same exit codes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import orchestrator.compose
from orchestrator.api.audit_schemas import AuditStatus
from orchestrator.api.event_schemas import EventList
from orchestrator.api.replica_schemas import RequestStatus
from orchestrator.api.schemas import JobStatus
from orchestrator.api.weight_schemas import UpdateList, UpdateStatus, WeightsStatus
from orchestrator.api.wire import WireModel
from orchestrator.cli import app
from orchestrator.signals import ASKING
from orchestrator.store.database import Database
from orchestrator.store.updates import UpdateStore
from orchestrator.weights.journal import position_of
from tests.fakes.stub_control_plane import stub_service
from tests.integration.orchestrator.control_plane import running_control_plane
from tests.integration.orchestrator.kept_fleet import until
from tests.unit.orchestrator.cli_runs import JOB, Cli, Said

UPDATABLE = JOB + '[weights]\nin_flight = "wait"\nlimits = {{grace = 0.05, again = 0.02, tries = 1}}\n'
TOKEN = "the-token"
LIFE: tuple[tuple[str, int, type[WireModel] | None], ...] = (
    ("status", 0, None),
    ("status --json", 0, None),
    ("status demo", 5, None),
    ("render job.toml", 0, None),
    ("render job.toml --json", 0, None),
    ("up job.toml --set roles.decode.replica=2", 2, None),
    ("up job.toml --set kv_offload.cpu.num_bytes='1000TiB'", 2, None),
    ("up job.toml", 0, None),
    ("up job.toml --json", 0, JobStatus),
    ("up job.toml --set engine.block_size=64", 4, None),
    ("status", 0, None),
    ("status demo --json", 0, JobStatus),
    ("logs demo -n 1", 0, None),
    ("logs demo router --json", 0, None),
    ("logs demo ruter", 5, None),
    ("logs demo ..", 5, None),
    ("logs demo -n 10001", 2, None),
    ("events demo --since 0", 0, None),
    ("events nobody", 5, None),
    ("events .. --json", 5, None),
    ("events --since 9223372036854775808", 2, None),
    ("status ..", 5, None),
    ("down demo/record", 5, None),
    ("audit demo", 3, None),
    ("audit demo --json", 3, AuditStatus),
    ("audit nobody", 5, None),
    ("audit demo --requests 1001", 2, None),
    ("restart demo router", 4, None),
    ("restart demo router --force --json", 0, RequestStatus),
    ("restart demo ruter", 5, None),
    ("drain demo router", 5, None),
    ("undrain demo decode-0", 4, None),
    ("weights push demo checkpoint --version v1 --in-flight readmit", 4, None),
    ("weights push demo nothing.json", 2, None),
    ("weights push demo checkpoint --version v1 --json", 0, UpdateStatus),
    ("weights status demo", 0, None),
    ("weights status demo --json", 0, WeightsStatus),
    ("weights history demo", 0, None),
    ("weights history demo --json", 0, UpdateList),
    ("weights history demo --lines 0", 2, None),
    ("weights cancel demo", 1, None),
    ("weights cancel demo --number 7", 5, None),
    ("weights cancel demo --number 0", 2, None),
    ("weights cancel demo --number 9223372036854775807", 5, None),
    ("weights cancel demo --number 9223372036854775808", 2, None),
    ("drain demo decode-0 --force --no-wait --json", 0, RequestStatus),
    ("drain demo decode-0", 4, None),
    ("scale demo decode 1", 4, None),
    ("scale demo decode 0", 2, None),
    ("scale demo colocated 2", 5, None),
    ("scale demo decode 40", 2, None),
    ("doctor --python /no/such/python", 1, None),
    ("down demo --json", 0, JobStatus),
    ("events demo -n 1", 0, None),
    ("events demo --json", 0, EventList),
    ("weights push demo checkpoint --version v2", 4, None),
    ("restart demo router", 4, None),
    ("down demo --forget", 0, None),
    ("down demo", 5, None),
    ("stop demo", 2, None),
)
"""A command, its exit code, and what it prints as JSON."""


class Way:
    """Runs the table, and keeps what was said."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cli = cli
        self._monkeypatch = monkeypatch

    def life(self, home: Path, told: str = "") -> list[tuple[str, str]]:
        """Of a job in `home`; `told`: the URL of its server, which is asked from another one."""
        self._monkeypatch.setenv("HEADRACE_HOME", str(self._cli.folder / "nowhere" if told else home))
        said = []
        for command, code, model in LIFE:
            if told:
                self._monkeypatch.setenv("HEADRACE_URL", told)
                self._monkeypatch.setenv("HEADRACE_API_TOKEN", TOKEN)
            if command.startswith("weights status"):
                _await_purge(home)
            found = self._cli(*command.split(), code=code)
            if model is not None:
                model.model_validate_json(found.stdout)
            # A control plane adopts jobs, and says so among the events; what was asked for before may be done by now.
            is_told = not command.startswith(("events demo --", "drain demo decode-0")) and "doctor" not in command
            said.append((command, _comparable(found, home) if is_told else ""))
        return said


def _await_purge(home: Path) -> None:
    """An update has ended once it is committed; what it leaves behind in the pool goes after that."""
    updates = UpdateStore(Database(home))
    until(lambda: (position := position_of(updates, "demo")) is not None and position.course is None)


def _comparable(said: Said, home: Path) -> str:
    """Without times, pids and the state folder, and without what is recorded once somebody supervises the job. Of
    errors the text, of progress nothing."""
    out = said.stdout
    if out.startswith("{") and "events" in (table := json.loads(out.splitlines()[0] if "\n{" in out else out)):
        out = json.dumps({**table, "events": [], "weights": None})
    if not out:
        out = re.sub(r"http\S+ stops demo\n", "", said.stderr)
    out = re.sub(r"demo:[0-9a-f]{8}:", "demo:RUN:", out)
    out = out.replace(str(home), "HOME")
    out = re.sub(r"weights +initial, epoch 1\n", "", out)
    out = re.sub(r"\d{8}T\d{6}Z-[0-9a-f]{8}|\b[0-9a-f]{10,}\b", "ID", out)
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "N", out))


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    handlers = {sent: signal.getsignal(sent) for sent in ASKING}
    cli = Cli(tmp_path, monkeypatch, capsys)
    cli.job(UPDATABLE)
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.setattr(orchestrator.compose, "local_service", stub_service)
    yield cli
    for sent, handler in handlers.items():
        signal.signal(sent, handler)


@pytest.mark.timeout(600)
# A command's process ends while those that it started live on; here it is this process that goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_command_says_the_same_in_every_way(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(cli, monkeypatch)
    local = way.life(cli.home)
    (tmp_path / "served").mkdir()
    with running_control_plane(tmp_path / "served", {"HEADRACE_API_TOKEN": TOKEN}) as server:
        announced = server.home / "control-plane.json"
        assert announced.stat().st_mode & 0o777 == 0o600
        found = way.life(server.home)
        told = way.life(server.home, server.url)
    assert not announced.exists()
    assert not (tmp_path / "nowhere").exists()
    both = zip([*local, *local], [*found, *told], strict=True)
    assert [(here, there) for here, there in both if here != there] == []


def test_the_table_has_every_command_and_each_takes_json() -> None:
    told = {tuple(command.split()[: 2 if command.startswith("weights") else 1]) for command, _, _ in LIFE}
    for names, command in _commands(typer.main.get_command(app), ()):
        if names != ("serve",):
            assert names in told
            assert "--json" in [option for parameter in command.params for option in parameter.opts]


def _commands(command: object, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], typer.core.TyperCommand]]:
    if isinstance(command, typer.core.TyperGroup):
        for name, below in command.commands.items():
            yield from _commands(below, (*names, name))
    else:
        assert isinstance(command, typer.core.TyperCommand)
        yield names, command
