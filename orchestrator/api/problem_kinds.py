"""Which error is which problem, for the answers of the API (`problems.py`) and the exit codes of the CLI."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import (
    AuditFailed,
    AuditRefused,
    CancelRefused,
    HeadraceError,
    JobDiffers,
    JobExists,
    JobUnknown,
    OperationUnknown,
    PlanRefused,
    ProcessUnknown,
    RequestRefused,
    RequestUnknown,
    SpecError,
    StopRefused,
    Unsupported,
    UpdateFailed,
    UpdateRefused,
    UpdateUnended,
    UpdateUnknown,
)
from orchestrator.store.jobs import PortsReserved
from orchestrator.store.records import RecordUnreadable

MEDIA_TYPE = "application/problem+json"


class UnreadableBody(SpecError):
    """The body is no text, or no well-formed table: what stands in it was not looked at."""


class UnknownBodyType(SpecError):
    """The content type says neither JSON nor TOML."""


@dataclass(frozen=True, kw_only=True)
class ProblemKind:
    error: type[HeadraceError]
    status: int
    title: str

    @property
    def type(self) -> str:
        return f"urn:headrace:problem:{self.title.lower().replace(' ', '-')}"


KINDS: tuple[ProblemKind, ...] = (
    ProblemKind(error=UnknownBodyType, status=415, title="Unknown body type"),
    ProblemKind(error=UnreadableBody, status=400, title="Unreadable body"),
    ProblemKind(error=SpecError, status=422, title="Unusable job file"),
    ProblemKind(error=PlanRefused, status=422, title="Job cannot run"),
    ProblemKind(error=Unsupported, status=422, title="Unsupported"),
    ProblemKind(error=JobUnknown, status=404, title="Unknown job"),
    ProblemKind(error=ProcessUnknown, status=404, title="Unknown process"),
    ProblemKind(error=UpdateUnknown, status=404, title="Unknown update"),
    ProblemKind(error=JobDiffers, status=409, title="Job differs"),
    ProblemKind(error=RequestUnknown, status=404, title="Unknown request"),
    ProblemKind(error=OperationUnknown, status=404, title="Unknown operation"),
    ProblemKind(error=StopRefused, status=409, title="Stop refused"),
    ProblemKind(error=CancelRefused, status=409, title="Cancel refused"),
    ProblemKind(error=JobExists, status=409, title="Job exists"),
    ProblemKind(error=UpdateRefused, status=409, title="Update refused"),
    ProblemKind(error=RequestRefused, status=409, title="Request refused"),
    ProblemKind(error=PortsReserved, status=409, title="Ports reserved"),
    ProblemKind(error=RecordUnreadable, status=409, title="Record unreadable"),
    ProblemKind(error=UpdateFailed, status=500, title="Update failed"),
    ProblemKind(error=AuditRefused, status=409, title="Audit refused"),
    ProblemKind(error=AuditFailed, status=503, title="Audit failed"),
    ProblemKind(error=UpdateUnended, status=504, title="Update unended"),
    ProblemKind(error=HeadraceError, status=500, title="Failed"),
)
"""The first that fits counts."""


def kind_of(error: HeadraceError) -> ProblemKind:
    return next(kind for kind in KINDS if isinstance(error, kind.error))
