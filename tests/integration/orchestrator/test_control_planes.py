"""The two control planes that a command may speak to, and which of them it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.access import Access
from orchestrator.api.problem_kinds import MEDIA_TYPE
from orchestrator.api.server import build_app
from orchestrator.api.weight_schemas import PushBody
from orchestrator.control.choose import Told, control_plane
from orchestrator.control.local import LocalControlPlane
from orchestrator.control.over_http import HttpControlPlane
from orchestrator.control.plane import ControlPlane
from orchestrator.errors import HeadraceError, JobFailed, NoAnswer, ProblemAnswered
from orchestrator.exit_codes import ExitCode, exit_code_of
from orchestrator.store.events import Event
from orchestrator.store.listening import Listening, announced, announced_in
from orchestrator.store.locks import ControlPlaneLock
from tests.fakes.fake_launch import FakeFleet
from tests.fakes.stub_job import free_ports
from tests.integration.orchestrator.planes import TOKEN

NOBODY_TOLD = Told(server=None, token_file=None)


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


def test_a_start_that_fails_says_its_cause(fleet: FakeFleet, control: ControlPlane) -> None:
    fleet.machine.log_text = "RuntimeError: no room for the cache\n"
    fleet.machine.on_start = lambda name: fleet.machine.kill(name, exit_code=3) if name == "prefill-0" else None
    with pytest.raises(JobFailed) as failure:
        control.start(fleet.spec(), warn=lambda _notes: None, progress=lambda progress: None)
    assert "prefill-0 ended with exit code 3" in str(failure.value)
    assert "no room for the cache" in str(failure.value)
    assert exit_code_of(failure.value) == ExitCode.FAILED
    assert control.job("demo").phase == "failed"
    assert not fleet.machine.living


def test_logs_are_followed_until_the_job_ends(fleet: FakeFleet, control: ControlPlane) -> None:
    job = fleet.running()
    found = control.logs("demo", "router", 1, following=True)
    assert next(found).line == "last line"
    with (job.run.log_dir / "router.log").open("a") as log:
        log.write("a\u2028b\x0cc\n")
    # Only a line feed ends a line.
    assert next(found) == ("router", "a\u2028b\x0cc")
    with (job.run.log_dir / "router.log").open("a") as log:
        log.write("unended")
    fleet.service().stop("demo")
    assert list(found) == [("router", "unended")]
    every = list(control.logs("demo", None, 1, following=True))
    assert sorted(each.process for each in every) == sorted(job.unit_names)


def test_events_are_followed(fleet: FakeFleet, control: ControlPlane) -> None:
    fleet.running()
    found = control.new_events("demo", control.events("demo", None, 1).next)
    fleet.store.events.note("demo", Event(kind="remark", text="new"))
    assert next(found).text == "new"


def test_readmission_takes_a_router_that_keeps_tokens(fleet: FakeFleet, control: ControlPlane) -> None:
    fleet.record(fleet.plan(weights={"in_flight": "wait"}))
    fleet.bring_up()
    push = PushBody(source={"transport": "path", "path": "/checkpoints/1"}, version="v1", in_flight="readmit")
    says = "in_flight is .readmit.: the job was started with 'wait'.*or start the job with weights.in_flight"
    with pytest.raises(HeadraceError, match=says) as refusal:
        control.push("demo", push)
    assert exit_code_of(refusal.value) == ExitCode.REFUSED
    assert control.updates("demo", 9).updates == []


@pytest.mark.parametrize("what", ["request", "update"])
def test_whoever_waits_asks_for_nothing_else_and_no_longer_than_the_job_lives(
    fleet: FakeFleet, serve: Callable[[Any], httpx.Client], what: str
) -> None:
    fleet.record(fleet.plan(weights={}))
    fleet.bring_up()
    app, asked = build_app(fleet.service(), Access({TOKEN: "admin"})), list[str]()

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        if len(asked) == 4:
            await run_in_threadpool(fleet.service().stop, "demo")
        await app(scope, receive, send)

    control = HttpControlPlane(str(serve(noting).base_url), TOKEN, is_local=True)
    if what == "request":
        control.request_seen_through("demo", control.restart("demo", "router", force=True).number)
    else:
        push = PushBody(source={"transport": "path", "path": "/checkpoints/1"}, version="v1")
        control.update_seen_through("demo", control.push("demo", push).number)
    one, operation = asked[1], asked[2]
    assert operation.startswith("/operations/demo:")
    assert asked[1:] == [one, operation, operation, one]


@pytest.mark.parametrize("name", ["demo/record", "..", ".", ""])
def test_a_name_that_would_lead_elsewhere_is_nobodys(fleet: FakeFleet, control: ControlPlane, name: str) -> None:
    job = fleet.running()
    for act in (control.job, control.weights, lambda name: control.events(name, None, 1), control.forget):
        with pytest.raises(HeadraceError, match=f"no job is called '{name}'; recorded jobs: demo") as unknown:
            act(name)
        assert exit_code_of(unknown.value) == ExitCode.UNKNOWN
    with pytest.raises(HeadraceError, match=f"no job is called '{name}'"):
        control.stop(name, lambda _text: None)
    if name:
        for find in (
            lambda: [*control.logs("demo", name, 1, following=False)],
            lambda: control.restart("demo", name, force=True),
        ):
            with pytest.raises(
                HeadraceError, match=f"job 'demo' has no process '{name}'; it has: mooncake-"
            ) as unknown:
                find()
            assert exit_code_of(unknown.value) == ExitCode.UNKNOWN
    assert fleet.store.get("demo") == job


def test_a_silent_control_plane(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    control = HttpControlPlane(f"http://127.0.0.1:{port}", TOKEN, is_local=True)
    with pytest.raises(NoAnswer, match=f"127.0.0.1:{port} gives no answer.*see that `headrace serve` runs") as silence:
        control.names()
    assert exit_code_of(silence.value) == ExitCode.NO_ANSWER
    for url in ("no-url", "http://a..b:1", f"http://{'a' * 64}.example:1"):
        with pytest.raises(NoAnswer):
            HttpControlPlane(url, TOKEN, is_local=True).names()


def test_a_wrong_token(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> None:
    url = str(serve(build_app(fleet.service(), Access({TOKEN: "viewer", "other": "admin"}))).base_url)
    with pytest.raises(ProblemAnswered, match="HEADRACE_API_TOKEN") as refusal:
        HttpControlPlane(url, "wrong", is_local=True).names()
    assert exit_code_of(refusal.value) == ExitCode.REFUSED
    with pytest.raises(ProblemAnswered, match="takes a token with the role admin, and yours is viewer"):
        HttpControlPlane(url, TOKEN, is_local=True).stop("demo", lambda text: None)


def test_what_is_no_control_plane_is_said_to_be_none(serve: Callable[[Any], httpx.Client]) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["path"] == "/jobs" else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    control = HttpControlPlane(str(serve(other).base_url), "", is_local=True)
    with pytest.raises(ProblemAnswered, match="answers 404 to /events; is it a `headrace serve`"):
        control.events(None, None, 1)
    with pytest.raises(HeadraceError, match="another version of Headrace .jobs: Field required"):
        control.names()


@pytest.mark.parametrize("status", [200, 302])
@pytest.mark.parametrize("media_type", ["text/html; charset=utf-8", "application/json"])
def test_a_page_of_another_program_is_no_log_and_no_stream(
    serve: Callable[[Any], httpx.Client], status: int, media_type: str
) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", media_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"<html>data: 1"})

    control = HttpControlPlane(str(serve(other).base_url), "", is_local=True)
    with pytest.raises(HeadraceError, match="is it a `headrace serve`"):
        list(control.logs("demo", "router", 1, following=False))
    with pytest.raises(HeadraceError, match="is it a `headrace serve`"):
        next(control.new_events(None, None))


def test_an_answer_that_cannot_be_decoded_is_none(serve: Callable[[Any], httpx.Client]) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"no gzip"})

    control = HttpControlPlane(str(serve(broken).base_url), "", is_local=True)
    with pytest.raises(NoAnswer):
        control.names()
    with pytest.raises(NoAnswer):
        list(control.logs("demo", "router", 1, following=False))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_reaches_no_control_plane_is_no_answer(serve: Callable[[Any], httpx.Client], status: int) -> None:
    kinds = {"/jobs": b"text/html", "/jobs/demo": MEDIA_TYPE.encode()}

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kinds[scope["path"]])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"detail": "in its own words"}'})

    control = HttpControlPlane(str(serve(proxy).base_url), "", is_local=True)
    with pytest.raises(NoAnswer, match=f"gives no answer .{status} .*, from what stands before it"):
        control.names()
    with pytest.raises(ProblemAnswered, match="in its own words"):
        control.job("demo")


@pytest.fixture
def warnings() -> list[str]:
    return []


def chosen(home: Path, warnings: list[str]) -> type[object]:
    return type(control_plane(home, NOBODY_TOLD, warnings.append))


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    lock = ControlPlaneLock(tmp_path)
    lock.take()
    yield tmp_path
    lock.release()


def test_without_a_server_the_state_folder_answers(tmp_path: Path, warnings: list[str]) -> None:
    assert chosen(tmp_path, warnings) is LocalControlPlane


def test_a_server_that_was_killed_is_passed_over(tmp_path: Path, warnings: list[str]) -> None:
    """It left its file behind, and its lock is free."""
    (tmp_path / "control-plane.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "old"}))
    assert chosen(tmp_path, warnings) is LocalControlPlane
    assert warnings == []


def test_a_server_that_hangs_is_passed_over_and_named(held: Path, warnings: list[str]) -> None:
    (port,) = free_ports(1)
    with announced(held, Listening(url=f"http://127.0.0.1:{port}", token=TOKEN)):
        assert chosen(held, warnings) is LocalControlPlane
    assert [f"127.0.0.1:{port} (pid {os.getpid()}) does not answer" in text for text in warnings] == [True]
    assert str(held) in warnings[0]


def test_a_server_on_the_state_folder_is_found(
    held: Path, fleet: FakeFleet, serve: Callable[[Any], httpx.Client], warnings: list[str]
) -> None:
    url = str(serve(build_app(fleet.service(), Access({TOKEN: "admin"}))).base_url)
    with announced(held, Listening(url=url, token=TOKEN)):
        assert chosen(held, warnings) is HttpControlPlane
        assert control_plane(held, NOBODY_TOLD, warnings.append).names() == []
    assert announced_in(held) is None
    assert chosen(held, warnings) is LocalControlPlane
    assert warnings == []


def test_a_server_that_is_told_is_asked_with_the_token_that_is_told(
    fleet: FakeFleet, serve: Callable[[Any], httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(serve(build_app(fleet.service(), Access({TOKEN: "admin"}))).base_url)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HEADRACE_API_TOKEN", TOKEN)
    for told in (Told(server=url, token_file=None), Told(server=url, token_file=file)):
        assert control_plane(tmp_path, told, pytest.fail).names() == []
