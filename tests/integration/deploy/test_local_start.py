"""Preparing and starting units as processes: ports, programs, files, environment, logs."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.errors import FileNotWritten, FolderNotOurs, PortTaken, ProgramMissing, StartFailed
from deploy.local.process_table import snapshot
from deploy.unit import ListenPort, PlannedFile, PortRange

LIMIT_S = 5.0


def run_is_empty(workshop) -> bool:
    return not any(p.marker and p.marker.run_id == workshop.run.run_id for p in snapshot().values())


def test_a29_planned_port_held_names_port_and_owner(workshop, free_port):
    outsider = workshop.start_outsider("--listen", str(free_port), label="outsider")
    unit = workshop.unit(ports=(ListenPort(name="http", port=free_port),))
    planned = PlannedFile(path=workshop.folder / "a.json", text="{}")
    begun = time.monotonic()
    with pytest.raises(PortTaken) as raised:
        workshop.backend.prepare(workshop.run, [workshop.unit(name="master"), unit], [planned])
    assert time.monotonic() - begun < LIMIT_S
    comm = Path(f"/proc/{outsider}/comm").read_text().strip()
    assert str(raised.value) == (
        f"port {free_port} (http of decode-0) is taken by {comm} (pid {outsider}); free it or choose another port"
    )
    assert not planned.path.exists()
    assert run_is_empty(workshop)


def test_a29_port_held_by_a_leftover_names_its_unit_and_run(workshop, free_port):
    record = workshop.start("--listen", str(free_port), name="prefill-0")
    unit = workshop.unit(ports=(ListenPort(name="side channel", port=free_port),))
    with pytest.raises(PortTaken, match=f"pid {record.pid}, prefill-0 of run {workshop.run.run_id}"):
        workshop.backend.prepare(workshop.run, [unit], [])


def test_a29_port_bound_but_not_listening_is_taken(workshop, free_port):
    workshop.start_outsider("--bind", str(free_port), label="outsider")
    unit = workshop.unit(ports=(ListenPort(name="rpc", port=free_port),))
    with pytest.raises(PortTaken, match=rf"port {free_port} \(rpc of decode-0\) is taken by a process that has bound"):
        workshop.backend.prepare(workshop.run, [unit], [])


def test_a29_port_of_an_outgoing_connection_is_taken(workshop):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = client.getsockname()[1]
        unit = workshop.unit(ports=(ListenPort(name="metrics", port=port),))
        with pytest.raises(PortTaken, match=rf"a connection of .+ \(pid {os.getpid()}\); .+ choose a port below \d+"):
            workshop.backend.prepare(workshop.run, [unit], [])


def test_a_port_just_given_back_by_a_server_is_free(workshop):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.close()
    client.close()
    workshop.backend.prepare(workshop.run, [workshop.unit(ports=(ListenPort(name="http", port=port),))], [])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no-such-engine", "cannot start decode-0: no-such-engine is on no folder of PATH"),
        ("/no/such/engine", "cannot start decode-0: /no/such/engine does not exist; install it"),
        ("./engine", "is a relative path; give its absolute path"),
        ("/etc/passwd", "/etc/passwd is not executable; chmod"),
    ],
)
def test_a_missing_program_is_named_before_anything_is_written(workshop, program, message):
    unit = replace(workshop.unit(), argv=(program,))
    planned = PlannedFile(path=workshop.folder / "a.json", text="{}")
    with pytest.raises(ProgramMissing, match=message):
        workshop.backend.prepare(workshop.run, [unit], [planned])
    assert not planned.path.exists()


def test_a_program_is_looked_up_on_the_path_of_the_unit(workshop):
    program = workshop.folder / "bin" / "my-engine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    unit = replace(workshop.unit(), argv=("my-engine",), env={"PATH": f"{program.parent}:/bin"})
    workshop.backend.prepare(workshop.run, [unit], [])
    record = workshop.backend.start(workshop.run, unit)
    workshop.wait_until(lambda: workshop.backend.poll(workshop.run, [record])["decode-0"].exit_code == 0, "it is done")


def test_a_script_without_its_interpreter_is_named(workshop):
    program = workshop.folder / "moved"
    program.write_text("#!/no/such/python\n")
    program.chmod(0o755)
    with pytest.raises(StartFailed, match="interpreter named in its first line is missing; install"):
        workshop.backend.start(workshop.run, replace(workshop.unit(), argv=(str(program),)))


def test_files_are_written_whole_and_readable(workshop):
    path = workshop.folder / "new" / "deep" / "inference.json"
    old = os.umask(0o077)
    try:
        workshop.backend.prepare(workshop.run, [], [PlannedFile(path=path, text="old")])
        workshop.backend.prepare(workshop.run, [], [PlannedFile(path=path, text="nø")])
    finally:
        os.umask(old)
    assert path.read_text(encoding="utf-8") == "nø"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o755, 0o755]
    assert [file.name for file in path.parent.iterdir()] == ["inference.json"]


def test_a_file_that_cannot_be_written_is_named(workshop):
    (workshop.folder / "blocked").write_text("")
    path = workshop.folder / "blocked" / "inference.json"
    with pytest.raises(FileNotWritten, match=f"cannot write {path}"):
        workshop.backend.prepare(workshop.run, [], [PlannedFile(path=path, text="")])


def test_the_private_folder_is_there_before_any_file_and_may_be_made_again(workshop):
    private = workshop.folder / "private"
    run = replace(workshop.run, private_dir=private)
    for _ in range(2):
        workshop.backend.prepare(run, [], [PlannedFile(path=private / "decode-0" / "owner.txt", text="")])
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("made_before", "says"),
    [
        (lambda path: path.mkdir(), "belongs to user"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "has mode 777"),
        (lambda path: (path.mkdir(), path.chmod(0o770)), "has mode 770"),
        (lambda path: path.symlink_to(path.parent), "is no folder"),
        (lambda path: path.write_text(""), "is no folder"),
    ],
)
def test_a_private_folder_that_others_can_change_is_refused(workshop, monkeypatch, made_before, says):
    private = workshop.folder / "private"
    made_before(private)
    if "user" in says:
        monkeypatch.setattr(os, "getuid", lambda: private.lstat().st_uid + 1)
    run = replace(workshop.run, private_dir=private)
    planned = PlannedFile(path=private / "owner.txt", text="")
    with pytest.raises(FolderNotOurs, match=f"{private} {says}.*remove it, or set TMPDIR"):
        workshop.backend.prepare(run, [], [planned])
    assert not planned.path.exists()


def test_a34_spaces_in_paths_reach_the_process_whole(workshop):
    folder = workshop.folder / "my run" / "a b"
    run = replace(workshop.run, log_dir=folder / "log files")
    config = folder / "inference decode.json"
    transfer = json.dumps({"kv_connector": "MultiConnector", "path": "/my disk/kv 'x' \"y\" $HOME"})
    dump = folder / "seen by stub.json"
    argv = workshop.argv("--dump", str(dump), "--log", "ready", "--", str(config), transfer, label="decode-0")
    unit = replace(workshop.unit(), argv=argv)
    workshop.backend.prepare(run, [unit], [PlannedFile(path=config, text="{}")])
    record = workshop.backend.start(run, unit)
    workshop.pid("decode-0")
    seen = json.loads(dump.read_text())["argv"]
    assert tuple(seen) == argv[1:]
    assert json.loads(seen[-1]) == json.loads(transfer)
    assert record.log == folder / "log files" / "decode-0.log"
    assert record.log.read_text() == "ready\n"
    workshop.backend.stop(run, [record], grace_s=1.0)


def test_environment_and_log_of_a_unit(workshop, monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.setenv("CHANGED", "old")
    dump = workshop.folder / "dump.json"
    unit = replace(workshop.unit("--dump", str(dump), "--log", "one"), env={"CHANGED": "new"}, unset_env=("REMOVED",))
    record = workshop.backend.start(workshop.run, unit)
    workshop.pid("decode-0")
    environment = json.loads(dump.read_text())["env"]
    expected = {
        "KEPT": "1",
        "CHANGED": "new",
        "HEADRACE_RUN_ID": workshop.run.run_id,
        "HEADRACE_UNIT": "decode-0",
    }
    assert {name: environment.get(name) for name in (*expected, "REMOVED")} == {**expected, "REMOVED": None}
    workshop.backend.stop(workshop.run, [record], grace_s=1.0)

    (workshop.pid_folder / "decode-0.pid").unlink()
    workshop.start("--log", "two")
    assert record.log.read_text() == "one\ntwo\n"


def test_a_unit_runs_in_its_own_folder(workshop):
    dump, folder = workshop.folder / "dump.json", workshop.folder / "job folder"
    folder.mkdir()
    record = workshop.backend.start(workshop.run, replace(workshop.unit("--dump", str(dump)), cwd=folder))
    workshop.pid("decode-0")
    assert Path(f"/proc/{record.pid}/cwd").resolve() == folder
    workshop.backend.stop(workshop.run, [record], grace_s=1.0)


def test_a_folder_that_is_not_there_is_named(workshop):
    unit = replace(workshop.unit(), cwd=workshop.folder / "absent")
    with pytest.raises(StartFailed, match=r"its folder .*/absent does not exist; make it"):
        workshop.backend.start(workshop.run, unit)


@pytest.mark.parametrize(("needed", "taken"), [(2, True), (1, False)])
def test_a29_a_range_is_taken_when_too_few_of_its_ports_are_free(workshop, free_port, needed, taken):
    workshop.start_outsider("--listen", str(free_port), label="outsider")
    span = PortRange(name="transfers", first=free_port, count=2, needed=needed, setting="ports.base")
    unit = replace(workshop.unit(), port_ranges=(span,))
    if not taken:
        workshop.backend.prepare(workshop.run, [unit], [])
        return
    says = rf"port {free_port} \(transfers, 2 of {free_port}-{free_port + 1} must be free of decode-0\).*\(ports.base\)"
    with pytest.raises(PortTaken, match=says):
        workshop.backend.prepare(workshop.run, [unit], [])
