"""What is said to a client whose request was not served: statuses and words, used by `flow.py`."""

from __future__ import annotations

from router.core.events import LegAnswered
from router.core.replies import JSON, Reply, error_event, error_reply, retry_headers
from router.core.table import LegFailure

FAILURE_STATUS: dict[LegFailure, int] = {
    "unreachable": 503,
    "broken": 502,
    "timeout": 504,
    "engine_error": 502,
    "local": 503,
}
ABORTED_STATUS = 499
"""What nginx writes down for a client that closed its request; here somebody closed it on the client's behalf."""
ASKED_TO_END = "the request was aborted"
SHUTTING_DOWN = "the router is shutting down: send the request again"
INTERRUPTED = "new weights are being installed and running requests are ended: send the request again"


def passed_on(event: LegAnswered) -> Reply:
    """An engine's own reply; a 503 always says when to come back."""
    return Reply(
        status=event.status, body=event.body, content_type=event.content_type, headers=retry_headers(event.status)
    )


def unserved(event: LegAnswered, replica: str) -> Reply:
    """For a leg that an engine answered and did not serve: the engine's own words where it has found some."""
    if event.status >= 500 and event.content_type.startswith(JSON):
        return passed_on(event)
    detail = f"the engine answered {event.status}" + (" and failed" if event.status < 300 else "")
    return failed("engine_error", replica, detail)


def as_event(reply: Reply) -> bytes:
    """An error reply for a client whose stream has begun."""
    if reply.status >= 400 and reply.content_type.startswith(JSON) and b"\n" not in reply.body:
        return b"\n\ndata: %b\n\n" % reply.body
    return error_event(max(reply.status, 502), "an engine did not go on with the stream")


def failed(failure: LegFailure, replica: str, detail: str) -> Reply:
    """For a leg that came to nothing."""
    return error_reply(FAILURE_STATUS[failure], f"{replica}: {detail}")
