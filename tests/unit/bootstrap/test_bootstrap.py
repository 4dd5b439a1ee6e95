import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.local import bootstrap
from deploy.local.bootstrap import SetupError, Step


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone, in a folder with a space in its name."""
    root = tmp_path / "a clone"
    venv = root / ".venv"
    (root / "deploy" / "local").mkdir(parents=True)
    (root / "deploy" / "local" / "cpu-stack.txt").write_text("torch==1.0\n")
    (root / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(bootstrap, "ROOT", root)
    monkeypatch.setattr(bootstrap, "VENV", venv)
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(bootstrap, "STAMPS", venv / ".headrace")
    monkeypatch.setattr(bootstrap, "LOGS", root / ".cache" / "setup")
    return root


@pytest.fixture
def finish(clone: Path) -> Callable[[Step], None]:
    """Leaves what a step leaves when it has been done."""

    def leave(step: Step) -> None:
        step.result.parent.mkdir(parents=True, exist_ok=True)
        step.result.touch()
        bootstrap.STAMPS.mkdir(exist_ok=True)
        step.stamp()

    return leave


def waiting(*, stack: bool = False, dev: bool = False) -> list[str]:
    steps = bootstrap.planned_steps(stack=stack, dev=dev, model=Path("model"))
    return [step.name for step in steps if not step.done]


def finish_all(finish: Callable[[Step], None], *, stack: bool, dev: bool) -> None:
    for step in bootstrap.planned_steps(stack=stack, dev=dev, model=Path("model")):
        finish(step)


def test_a_step_is_done_once(clone: Path, finish: Callable[[Step], None]) -> None:
    assert waiting(stack=True, dev=True) == ["venv", "stack", "package-dev", "model"]
    finish_all(finish, stack=True, dev=True)
    assert waiting(stack=True, dev=True) == []


def test_only_what_changed_is_done_again(clone: Path, finish: Callable[[Step], None]) -> None:
    finish_all(finish, stack=True, dev=True)
    (clone / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert waiting(stack=True, dev=True) == ["package-dev"]
    (clone / "deploy" / "local" / "cpu-stack.txt").write_text("torch==2.0\n")
    assert waiting(stack=True, dev=True) == ["stack", "package-dev"]


def test_a_removed_result_is_made_again(clone: Path, finish: Callable[[Step], None]) -> None:
    finish_all(finish, stack=True, dev=True)
    (clone / "model" / "config.json").unlink()
    assert waiting(stack=True, dev=True) == ["model"]


def test_the_tools_need_not_be_asked_for_again(clone: Path, finish: Callable[[Step], None]) -> None:
    finish_all(finish, stack=False, dev=True)
    assert waiting(dev=False) == []


def test_a_venv_that_moved_is_made_anew(
    clone: Path, finish: Callable[[Step], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_all(finish, stack=True, dev=True)
    moved = clone.rename(clone.with_name("moved"))
    for name, place in {
        "ROOT": "",
        "VENV": ".venv",
        "VENV_PYTHON": ".venv/bin/python",
        "STAMPS": ".venv/.headrace",
    }.items():
        monkeypatch.setattr(bootstrap, name, moved / place)
    assert waiting(stack=True, dev=True) == ["venv", "stack", "package-dev", "model"]
    assert "--clear" in bootstrap.venv_commands("3.11")[0]


def test_a_venv_of_a_killed_run_is_completed(clone: Path) -> None:
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / "pyvenv.cfg").write_text("version = 3.11.7\n")
    assert "--clear" not in bootstrap.venv_commands("3.11")[0]


def test_somebody_elses_venv_is_left_alone(clone: Path) -> None:
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / "pyvenv.cfg").write_text("version = 3.12.1\n")
    with pytest.raises(SetupError, match=r"for Python 3\.12, and this is 3\.11; remove it"):
        bootstrap.venv_commands("3.11")


def test_a_half_installed_package_is_forgotten(clone: Path) -> None:
    site = bootstrap.VENV / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info", "~oved"):
        (site / name).mkdir(parents=True)
    (site / "whole-1.dist-info" / "INSTALLER").touch()
    bootstrap.remove_half_installed()
    assert [entry.name for entry in site.iterdir()] == ["whole-1.dist-info"]


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: Failed to establish a new connection", "network did not answer"),
        ("Temporary failure resolving 'a.mirror'", "network did not answer"),
        ("ERROR: No matching distribution found for nixl==1", "has no build for Python"),
    ],
)
def test_a_failure_names_the_log_its_end_and_the_mend(clone: Path, last: str, hint: str) -> None:
    log = clone / "pip.log"
    script = f"for i in $(seq 40); do echo line $i; done; echo {last!r}; exit 3"
    with pytest.raises(SetupError) as caught:
        bootstrap.run_logged("stack", [["bash", "-c", script], ["touch", "never"]], log)
    text = str(caught.value)
    assert f"stack: failed with exit code 3. The end of {log}:" in text
    assert "line 40" in text
    assert "line 20" not in text
    assert hint in text
    assert not (clone / "never").exists()


def test_a_step_that_failed_is_not_stamped(clone: Path) -> None:
    bootstrap.LOGS.mkdir(parents=True)
    step = Step("stack", "stack", ["x"], [["false"]], clone)
    with pytest.raises(SetupError), bootstrap.one_at_a_time() as lock:
        bootstrap.do_step(step, lock)
    assert not step.done


def test_a_second_setup_waits_for_the_first(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bootstrap.one_at_a_time() as lock:
        # What a killed setup leaves: a child that still works and has inherited the lock.
        child = subprocess.Popen(["sleep", "0.5"], pass_fds=[lock])
    with bootstrap.one_at_a_time():
        assert child.wait() == 0
    assert "waiting for another setup" in capsys.readouterr().out


def test_without_root_the_exact_command_is_told(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "loads", lambda library: library != "libnuma.so.1")
    monkeypatch.setattr(bootstrap, "administrator", lambda: None)
    missing = bootstrap.missing_packages(stack=True, venv=False)
    with pytest.raises(SetupError, match="sudo apt-get install -y --no-install-recommends libnuma1$"):
        bootstrap.install_debian(missing)


def test_a_missing_program_is_only_a_warning(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "administrator", lambda: None)
    bootstrap.offer(["prometheus", "chromium"])
    said = capsys.readouterr().out
    assert "warning: no Prometheus" in said
    assert "no Chromium" in said


def test_a_python_without_venv_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    assert bootstrap.missing_packages(stack=False, venv=True) == ["python3-venv"]
    assert bootstrap.missing_packages(stack=False, venv=False) == []


def test_refused_machines(clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupError, match="on riscv64; Headrace runs on Linux on x86_64 or aarch64"):
        bootstrap.check_machine()
    monkeypatch.setattr(bootstrap, "sys", SimpleNamespace(version_info=(3, 9, 2), executable="/usr/bin/python3"))
    with pytest.raises(SetupError, match=r"Headrace needs 3\.11 or newer"):
        bootstrap.check_machine()


def test_a_small_disk_is_refused_before_anything_is_fetched(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 2_000_000_000))
    bootstrap.check_disk(bootstrap.BASE_GB)
    with pytest.raises(SetupError, match=r"has 2\.0 GB free, about 6 GB are needed"):
        bootstrap.check_disk(bootstrap.STACK_GB)


def test_an_old_python_can_read_the_program() -> None:
    """It has to tell its user that Python is too old, so it must not fail on its own syntax first."""
    source = Path(bootstrap.__file__).read_text()
    script = "import ast, sys; ast.parse(sys.stdin.read(), feature_version=(3, 8))"
    subprocess.run([sys.executable, "-c", script], input=source, text=True, check=True)
