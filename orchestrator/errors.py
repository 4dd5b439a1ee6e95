"""The orchestrator's errors.

    HeadraceError               every error whose text is meant for a user
    ├── SpecError               the job file is wrong: the user mends it
    │   ├── UnknownBodyType     a body is sent as neither JSON nor TOML (api/problem_kinds.py)
    │   └── UnreadableBody      a body is no well-formed table (api/problem_kinds.py)
    ├── PlanRefused             the job file is well-formed but cannot run: the user mends it
    ├── JobExists               a job of this name is already recorded: the user stops it first
    │   └── JobDiffers          and it was started from another job file
    ├── JobUnknown              no job of this name is recorded
    ├── ProcessUnknown          a job has no process of this name
    ├── StopRefused             a job cannot be drained now: the user stops it at once, or later
    ├── OperationUnknown        no operation has this id
    ├── CancelRefused           an operation is past cancelling
    ├── JobFailed               a process died, was not ready in time, or a start-up check failed
    ├── Unsupported             this version cannot do what was asked
    ├── UpdateRefused           weights cannot be updated so, or not now: the user asks otherwise, or later
    ├── UpdateFailed            an update has ended, and the job does not serve it
    ├── UpdateUnended           an update goes on, and nobody can wait for it any longer: the user asks again
    ├── UpdateUnknown           no update of this number was asked for
    ├── RequestRefused          a process cannot be restarted or drained so, or not now
    ├── RequestUnknown          no request of this number was made, or about no such process
    ├── AuditFailed             an audit could not be made
    │   └── AuditRefused        the job does not serve: the user asks later
    ├── ServerUnusable          what is given as a control plane's URL is none: the user mends it
    ├── NoAnswer                a control plane is silent: nobody knows what it has done of what was asked
    ├── ProblemAnswered         a control plane has answered so
    ├── CoordinatorReplaced     another coordinator has taken a job's weights over (store/updates.py)
    ├── StopIncomplete          processes could not be ended, or their end not recorded (supervisor/stop.py)
    ├── PortsReserved           another job was recorded with these ports meanwhile: plan again (store/jobs.py)
    ├── RecordUnreadable        a record was written by another version (store/records.py)
    ├── StateInUse              another control plane runs on the state folder (store/locks.py)
    ├── TokensRefused           tokens of the control API cannot be used as they were given (store/tokens.py)
    ├── AddressUnusable         the control API cannot listen where it was told to (cli_serve.py)
    └── StateUnusable           the state folder cannot be read or written (store/home.py)

Each message says what is wrong, with the field and the values, and what mends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing wrong with a job file."""

    field: str
    """Dotted name as written in the job file, e.g. "roles.decode.kv_offload.cpu.num_bytes"."""
    problem: str
    mend: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.mend}" if self.mend else f"{self.field}: {self.problem}"


class HeadraceError(Exception):
    """An error whose text is meant for a user."""

    complaints: tuple[Complaint, ...] = ()
    """Each thing that is wrong with a job file, where that is what the error is about."""


class SpecError(HeadraceError):
    """The job file is wrong. All that was found is listed, not only the first."""

    def __init__(self, source: str, complaints: Sequence[Complaint]) -> None:
        self.source = source
        self.complaints = tuple(complaints)
        lines = "\n".join(f"  {complaint}" for complaint in self.complaints)
        super().__init__(f"{source} cannot be used:\n{lines}")


class PlanRefused(HeadraceError):
    """The job is well-formed but must not be started."""

    def __init__(self, job: str, complaints: Sequence[Complaint]) -> None:
        self.complaints = tuple(complaints)
        lines = "\n".join(f"  {complaint}" for complaint in self.complaints)
        super().__init__(f"job {job!r} cannot run:\n{lines}")


class JobExists(HeadraceError):
    """A job of this name is recorded and not ended."""


class JobDiffers(JobExists):
    """A job of this name lives, and was started from another job file."""

    def __init__(self, job: str, phase: str, complaints: Sequence[Complaint]) -> None:
        self.complaints = tuple(complaints)
        lines = "\n".join(f"  {complaint}" for complaint in self.complaints)
        mend = f"stop it with `headrace down {job}`, or give this one another name"
        super().__init__(f"job {job!r} is already recorded as {phase}, from another job file; {mend}:\n{lines}")


class JobUnknown(HeadraceError):
    """No job of this name is recorded."""

    def __init__(self, name: str, recorded: Sequence[str]) -> None:
        super().__init__(f"no job is called {name!r}; recorded jobs: {', '.join(recorded) or 'none'}")


class ProcessUnknown(HeadraceError):
    """A job has no process of this name."""

    def __init__(self, job: str, process: str, known: Sequence[str]) -> None:
        super().__init__(f"job {job!r} has no process {process!r}; it has: {', '.join(known)}")


class JobFailed(HeadraceError):
    """A job did not come up. Whoever drives the start then ends everything that was started."""


class StopRefused(HeadraceError):
    """A stop that is not begun; nothing has changed."""


class OperationUnknown(HeadraceError):
    """No operation has this id, or its run is no longer recorded."""


class CancelRefused(HeadraceError):
    """An operation that goes on, or stays, as it is."""


class UpdateRefused(HeadraceError):
    """An update of the weights that is not begun; nothing has changed."""


class UpdateFailed(HeadraceError):
    """An update of the weights has ended, and the job does not serve what was asked for."""


class UpdateUnended(HeadraceError):
    """An update of the weights goes on for longer than its caller can wait."""


class UpdateUnknown(HeadraceError):
    """No update of this number was asked for."""


class RequestRefused(HeadraceError):
    """A restart or drain that is not begun; nothing has changed."""


class RequestUnknown(HeadraceError):
    """No request of this number was made, or the job has no such process."""


class AuditFailed(HeadraceError):
    """An audit could not be made: nothing is known of the job's KV."""


class AuditRefused(AuditFailed):
    """Only a job that serves can be audited."""


class Unsupported(HeadraceError):
    """This version cannot do what was asked."""


class ServerUnusable(HeadraceError):
    """What is given as the URL of a control plane is none."""


class NoAnswer(HeadraceError):
    """A control plane does not answer."""


class ProblemAnswered(HeadraceError):
    """What a control plane refuses, or could not do, in its own words."""

    def __init__(self, detail: str, status: int) -> None:
        super().__init__(detail)
        self.status = status
