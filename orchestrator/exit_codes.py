"""The exit codes of `headrace`. Those of errors go with the status that the API answers them with."""

from __future__ import annotations

from enum import IntEnum

from orchestrator.api.problem_kinds import kind_of
from orchestrator.errors import HeadraceError, NoAnswer, ProblemAnswered, ServerUnusable
from orchestrator.store.tokens import TokensRefused


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    NOT_JUDGED = 3
    REFUSED = 4
    UNKNOWN = 5
    NO_ANSWER = 6
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "tried, and it failed: a job did not come up, an update was not committed, KV is stale",
    ExitCode.WRONG_USE: "the command line or the job file is wrong; nothing was begun",
    ExitCode.NOT_JUDGED: "an audit could judge nothing",
    ExitCode.REFUSED: "not as things are, or not with this token; nothing was begun",
    ExitCode.UNKNOWN: "there is no such job, process, update or request",
    ExitCode.NO_ANSWER: "the control plane does not answer; what was asked of it may go on",
    ExitCode.INTERRUPTED: "interrupted",
}
_OF_STATUS = {
    400: ExitCode.WRONG_USE,
    401: ExitCode.REFUSED,
    403: ExitCode.REFUSED,
    404: ExitCode.UNKNOWN,
    409: ExitCode.REFUSED,
    413: ExitCode.WRONG_USE,
    415: ExitCode.WRONG_USE,
    422: ExitCode.WRONG_USE,
    503: ExitCode.NOT_JUDGED,
    504: ExitCode.NO_ANSWER,
}
"""Any other: failed."""


def exit_code_of(error: HeadraceError) -> ExitCode:
    if isinstance(error, NoAnswer):
        return ExitCode.NO_ANSWER
    if isinstance(error, ServerUnusable | TokensRefused):
        return ExitCode.WRONG_USE
    status = error.status if isinstance(error, ProblemAnswered) else kind_of(error).status
    return _OF_STATUS.get(status, ExitCode.FAILED)
