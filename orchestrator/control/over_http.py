"""Asks a `headrace serve`. A problem that it answers is raised with its text and status."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from httpx import codes
from pydantic import ValidationError

from connectors.types import Role
from orchestrator.api.audit_schemas import AuditBody, AuditStatus
from orchestrator.api.event_schemas import EventList, EventStatus
from orchestrator.api.operation_schemas import OperationStatus
from orchestrator.api.problem_kinds import MEDIA_TYPE
from orchestrator.api.replica_schemas import LeaveBody, RequestStatus, ScaleBody
from orchestrator.api.schemas import JobList, JobStatus
from orchestrator.api.weight_schemas import PushBody, UpdateList, UpdateStatus, WeightsStatus
from orchestrator.api.wire import Note, WireModel
from orchestrator.background import beside
from orchestrator.control.plane import LOOK_EVERY_S, LogLine, see_start_through
from orchestrator.errors import HeadraceError, JobUnknown, NoAnswer, ProblemAnswered, ProcessUnknown
from orchestrator.plan.types import JobPlan, plan_from_json
from orchestrator.spec.difference import asked_for
from orchestrator.spec.job import JobSpec
from orchestrator.supervisor.interfaces import Progress, ProgressSink

CONNECTS_WITHIN_S = 10.0
ANSWERS_WITHIN_S = 60.0
SOON = httpx.Timeout(ANSWERS_WITHIN_S, connect=CONNECTS_WITHIN_S)
"""Also between two parts of a stream of events, which has a ping every 15 s."""
ONCE_DONE = httpx.Timeout(None, connect=CONNECTS_WITHIN_S)
"""For what is answered when it has been done."""
PLANNED_WITHIN_S = 30.0
"""How long whoever is interrupted waits to hear what it has begun."""
SOON_ENDED = httpx.Timeout(120.0, connect=CONNECTS_WITHIN_S)
"""For the end of a start that was interrupted: the server goes on with it, whoever waits."""
NOBODY_BEHIND = (codes.BAD_GATEWAY, codes.SERVICE_UNAVAILABLE, codes.GATEWAY_TIMEOUT)
"""What a proxy answers where it reaches no control plane, or has waited for one for too long."""

Answer = TypeVar("Answer", bound=WireModel)


class HttpControlPlane:
    """`is_local`: a server of this machine, that no proxy stands before."""

    def __init__(self, url: str, token: str, *, is_local: bool) -> None:
        self._url = url.rstrip("/")
        with self._answering():
            self._client = httpx.Client(
                base_url=self._url,
                headers={b"authorization": f"Bearer {token}".encode()} if token else {},
                limits=httpx.Limits(max_connections=None),
                trust_env=not is_local,
                # Reading the certificates of the machine takes as long as a command.
                verify=not self._url.startswith("http://"),
            )
        weakref.finalize(self, self._client.close)

    def answers(self, within_s: float) -> bool:
        with suppress(HeadraceError):
            return self._ask("GET", "/health", timeout=httpx.Timeout(within_s)).is_success
        return False

    def plan(self, spec: JobSpec) -> JobPlan:
        text = self._ask("POST", "/render", timeout=ONCE_DONE, json=asked_for(spec)).text
        try:
            return plan_from_json(text)
        except ValidationError as error:
            raise self._other_version(error) from error

    def start(self, spec: JobSpec, *, warn: Callable[[Sequence[Note]], None], progress: ProgressSink) -> JobStatus:
        # In a thread of its own: an interruption does not take the answer, which says what was begun.
        asked = beside(partial(self._begin, spec), name=f"start {spec.name}")
        try:
            is_new, job = asked.result()
            if is_new:
                warn(job.warnings)
            return see_start_through(partial(self.job, spec.name), progress)
        except KeyboardInterrupt:
            text = f"ending what this has begun of {spec.name}; interrupt again to leave it"
            progress(Progress(units=(), now_doing=text))
            # What goes wrong, or takes too long, is seen by whoever looks at the job then.
            with suppress(HeadraceError, TimeoutError):
                self._end_begun(*asked.result(PLANNED_WITHIN_S))
            raise

    def _end_begun(self, is_new: bool, job: JobStatus) -> None:
        """Also a job that has come up in the meantime; but no other run of it, and nothing that others have begun."""
        if is_new:
            self._get(OperationStatus, _operation_path(job.operation))
            self._get(JobStatus, self._path(job.name), method="DELETE", timeout=SOON_ENDED)

    def _begin(self, spec: JobSpec) -> tuple[bool, JobStatus]:
        """Whether this call has begun the job: others may ask for the same one at the same time."""
        reply = self._ask("POST", "/jobs", timeout=ONCE_DONE, json=asked_for(spec))
        return reply.status_code == codes.ACCEPTED, self._read(JobStatus, reply.content)

    def stop(self, name: str, say: Callable[[str], None]) -> JobStatus:
        path = self._path(name)
        say(f"{self._url} stops {name}")
        return self._get(JobStatus, path, method="DELETE", timeout=ONCE_DONE)

    def forget(self, name: str) -> None:
        self._ask("DELETE", self._path(name, "record"), timeout=ONCE_DONE)

    def names(self) -> list[str]:
        return [job.name for job in self._get(JobList, "/jobs").jobs]

    def job(self, name: str) -> JobStatus:
        return self._get(JobStatus, self._path(name))

    def logs(self, name: str, process: str | None, lines: int, *, following: bool) -> Iterator[LogLine]:
        processes = [process] if process else [unit.name for unit in self.job(name).units]
        if following and len(processes) > 1:
            yield from _merged([partial(self._log, name, each, lines, following=True) for each in processes])
            return
        for each in processes:
            yield from self._log(name, each, lines, following=following)

    def _log(self, name: str, process: str, lines: int, *, following: bool) -> Iterator[LogLine]:
        # A process may be silent for as long as it likes.
        timeout = ONCE_DONE if following else SOON
        path = self._path(name, "logs", process)
        with self._stream(path, "text/plain", timeout, tail=lines, follow=following) as found:
            for line in found:
                yield LogLine(process, line)

    def events(self, name: str | None, since: int | None, limit: int) -> EventList:
        return self._get(EventList, self._events_path(name), params=_given(since=since, limit=limit))

    def new_events(self, name: str | None, since: int | None) -> Iterator[EventStatus]:
        path = self._events_path(name) + "/stream"
        with self._stream(path, "text/event-stream", SOON, **_given(since=since)) as lines:
            for line in lines:
                field, _, value = line.partition(":")
                if field == "data":
                    yield self._read(EventStatus, value)

    def audit(self, name: str, requests: int) -> AuditStatus:
        body = AuditBody(requests=requests).model_dump()
        return self._get(AuditStatus, self._path(name, "audit"), method="POST", timeout=ONCE_DONE, json=body)

    def restart(self, name: str, process: str, *, force: bool) -> RequestStatus:
        return self._post_leave(self._path(name, "processes", process, "restart"), force)

    def drain(self, name: str, replica: str, *, force: bool) -> RequestStatus:
        return self._post_leave(self._path(name, "replicas", replica, "drain"), force)

    def undrain(self, name: str, replica: str) -> RequestStatus:
        return self._get(RequestStatus, self._path(name, "replicas", replica, "undrain"), method="POST")

    def scale(self, name: str, role: Role, replicas: int, *, force: bool) -> RequestStatus:
        body = ScaleBody(replicas=replicas, force=force).model_dump()
        return self._get(RequestStatus, self._path(name, "roles", role, "scale"), method="POST", json=body)

    def _post_leave(self, path: str, force: bool) -> RequestStatus:
        return self._get(RequestStatus, path, method="POST", json=LeaveBody(force=force).model_dump())

    def request_seen_through(self, name: str, number: int) -> RequestStatus:
        path = self._path(name, "requests", number)
        self._await_end(self._get(RequestStatus, path).operation)
        return self._get(RequestStatus, path)

    def push(self, name: str, body: PushBody) -> UpdateStatus:
        return self._get(UpdateStatus, self._path(name, "weights"), method="POST", json=body.model_dump(mode="json"))

    def cancel(self, name: str, number: int) -> UpdateStatus:
        return self._get(UpdateStatus, self._path(name, "weights", "updates", number), method="DELETE")

    def update_seen_through(self, name: str, number: int) -> UpdateStatus:
        path = self._path(name, "weights", "updates", number)
        self._await_end(self._get(UpdateStatus, path).operation)
        return self._get(UpdateStatus, path)

    def weights(self, name: str) -> WeightsStatus:
        return self._get(WeightsStatus, self._path(name, "weights"))

    def updates(self, name: str, limit: int) -> UpdateList:
        return self._get(UpdateList, self._path(name, "weights", "updates"), params={"limit": limit})

    def _path(self, name: str, *parts: str | int) -> str:
        """Raises `JobUnknown` or `ProcessUnknown` for what no job and no process is called, and what would name another
        resource there."""
        if not _is_one_part(name):
            raise JobUnknown(name, self.names())
        for part in map(str, parts):
            if not _is_one_part(part):
                raise ProcessUnknown(name, part, [unit.name for unit in self.job(name).units])
        return "/".join(["/jobs", *(quote(str(part), safe="") for part in (name, *parts))])

    def _events_path(self, name: str | None) -> str:
        return "/events" if name is None else self._path(name, "events")

    def _await_end(self, operation: str) -> None:
        """It ends with its job, if not before."""
        path = _operation_path(operation)
        while self._get(OperationStatus, path).state in ("pending", "running"):
            time.sleep(LOOK_EVERY_S)

    def _get(self, model: type[Answer], path: str, *, method: str = "GET", **options: Any) -> Answer:
        return self._read(model, self._ask(method, path, **options).content)

    def _ask(self, method: str, path: str, *, timeout: httpx.Timeout = SOON, **options: Any) -> httpx.Response:
        with self._answering():
            reply = self._client.request(method, path, timeout=timeout, **options)
        self._refuse_problem(reply)
        return reply

    @contextmanager
    def _stream(self, path: str, media_type: str, timeout: httpx.Timeout, **parameters: Any) -> Iterator[Iterator[str]]:
        """The lines of an answer as they come."""
        with self._answering(), self._client.stream("GET", path, params=parameters, timeout=timeout) as reply:
            if not reply.is_success:
                reply.read()
            self._refuse_problem(reply)
            found = reply.headers.get("content-type", "no content type")
            if not found.startswith(media_type):
                raise HeadraceError(f"{self._url} answers {found} to {path}; is it a `headrace serve`?")
            yield _lines(reply.iter_text())

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
            raise self._no_answer(str(error) or type(error).__name__) from error

    def _no_answer(self, why: str) -> NoAnswer:
        mend = "see that `headrace serve` runs there. What it was asked for before goes on"
        return NoAnswer(f"the control plane at {self._url} gives no answer ({why}); {mend}")

    def _refuse_problem(self, reply: httpx.Response) -> None:
        if reply.is_success:
            return
        is_problem = reply.headers.get("content-type", "").startswith(MEDIA_TYPE)
        if reply.status_code in NOBODY_BEHIND and not is_problem:
            raise self._no_answer(f"{reply.status_code} {reply.reason_phrase}, from what stands before it")
        try:
            detail = str(reply.json()["detail"])
        except (ValueError, KeyError, TypeError):
            detail = f"{self._url} answers {reply.status_code} to {reply.request.url.path}; is it a `headrace serve`?"
        if reply.status_code == codes.UNAUTHORIZED:
            detail = f"{self._url} does not know the token; set HEADRACE_API_TOKEN, or give --token-file"
        raise ProblemAnswered(detail, reply.status_code)

    def _read(self, model: type[Answer], text: str | bytes) -> Answer:
        try:
            return model.model_validate_json(text)
        except ValidationError as error:
            raise self._other_version(error) from error

    def _other_version(self, error: ValidationError) -> HeadraceError:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        mend = "use the `headrace` of its installation"
        return HeadraceError(f"{self._url} answers as another version of Headrace ({field}: {first['msg']}); {mend}")


def _is_one_part(text: str) -> bool:
    """Of a path: clients fold the first three, and servers decode what stands for a slash."""
    return text not in ("", ".", "..") and "/" not in text


def _operation_path(operation: str) -> str:
    return f"/operations/{quote(operation, safe='')}"


def _given(**parameters: int | None) -> dict[str, int]:
    return {name: value for name, value in parameters.items() if value is not None}


def _lines(chunks: Iterator[str]) -> Iterator[str]:
    """Only a line feed ends one: logs may hold what else Unicode ends lines with."""
    rest = ""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split("\n")
        yield from (line.removesuffix("\r") for line in complete)
    if rest:
        yield rest


def _merged(sources: Sequence[Callable[[], Iterator[LogLine]]]) -> Iterator[LogLine]:
    """Of all sources as they come, until all have ended or one fails."""
    found: queue.SimpleQueue[LogLine | HeadraceError | None] = queue.SimpleQueue()

    def read(source: Callable[[], Iterator[LogLine]]) -> None:
        try:
            for line in source():
                found.put(line)
            found.put(None)
        except HeadraceError as error:
            found.put(error)

    for source in sources:
        threading.Thread(target=read, args=(source,), daemon=True).start()
    left = len(sources)
    while left:
        match found.get():
            case None:
                left -= 1
            case HeadraceError() as error:
                raise error
            case line:
                yield line
