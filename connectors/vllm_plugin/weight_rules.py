"""Commands about weights as an engine's fence reads and answers them: no IO, no clock. `weight_routes.py` carries
them out.

    POST /weights/prefetch    begin to copy a version into host memory; answers at once
    POST /weights/load        put a version into the parameters; answers when it is there or has failed
    POST /weights/reset       forget a prefetch, and an update of vLLM's own that was never finished
    POST /weights/serve       let peers read this engine's weights
    GET  /weights/state       what every rank says, at any time

Each POST names the instance and its order, as POST /fence does. Loaded by the engine's interpreter: standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

from connectors.vllm_plugin.fence_rules import (
    WEIGHTS_PATH,
    Answer,
    CommandInvalid,
    FenceState,
    error_answer,
    order_of,
    read_fields,
)
from connectors.vllm_plugin.weights.settings import LoadMode
from connectors.vllm_plugin.weights.verdict import CommandName, EngineVerdict, WeightCommand

LONGEST_WEIGHT_COMMAND = 64 * 1024
"""Bytes of a body. A source names its tensors elsewhere."""
LONGEST_S = 86_400.0
"""A day. Infinity is a number for JSON's reader, and none for what waits."""
_OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda value: value in get_args(LoadMode), f"is none of {', '.join(get_args(LoadMode))}"),
    "check_finite": (lambda value: isinstance(value, bool), "is not true or false"),
    "timeout_s": (lambda value: _is_time(value), f"is not a number above 0 and at most {LONGEST_S:g}"),
    "limit_s": (lambda value: _is_time(value), f"is not a number above 0 and at most {LONGEST_S:g}"),
}
_POSTS: tuple[CommandName, ...] = ("prefetch", "load", "reset", "serve")


@dataclass(frozen=True)
class WeightRequest:
    """A command with the life of the engine that it is for."""

    instance: str
    command: WeightCommand


def route_name(method: str, path: str) -> CommandName | None:
    """Which command a request under /weights/ is; None where there is none."""
    name = path.removeprefix(WEIGHTS_PATH)
    if (method, name) == ("GET", "state"):
        return "state"
    return next((each for each in _POSTS if (method, name) == ("POST", each)), None)


def read_request(name: CommandName, body: bytes, call: str) -> WeightRequest:
    """Raises `CommandInvalid`."""
    has_source = name in ("prefetch", "load")
    data = read_fields(
        body,
        required=("source",) if has_source else (),
        optional=tuple(_OPTIONAL) if has_source else (),
        at_most=LONGEST_WEIGHT_COMMAND,
    )
    source = data.get("source", {})
    if not isinstance(source, dict):
        raise CommandInvalid("source", "is not a JSON object")
    for field in ("transport", "version") if has_source else ():
        if not isinstance(source.get(field), str) or not source[field]:
            raise CommandInvalid(f"source.{field}", "is missing or no text")
    given = {field: data[field] for field in _OPTIONAL if field in data}
    for field, value in given.items():
        is_valid, problem = _OPTIONAL[field]
        if not is_valid(value):
            raise CommandInvalid(field, problem)
    command = WeightCommand(name=name, call=call, order=order_of(data), source=source, **given)
    return WeightRequest(data["instance"], command)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_S


def load_refusal(state: FenceState) -> Answer | None:
    """Why no load may begin now; None where one may."""
    if state.lost:
        return error_answer(503, "fenced", state.unfit(), param="weights")
    if state.open_requests and not state.paused:
        message = f"{len(state.open_requests)} requests are running: pause the engine first"
        return error_answer(409, "conflict", message, param="pause")
    return None


def apply_verdict(state: FenceState, verdict: EngineVerdict) -> None:
    """Note what the ranks say of the weights."""
    state.lost = state.lost or verdict.lost
    if verdict.reports and not verdict.lost:
        state.torn = verdict.torn
        state.version = verdict.reports[0].version


def verdict_answer(state: FenceState, verdict: EngineVerdict, **more: object) -> Answer:
    """What a client is told."""
    told = {
        "ok": verdict.ok,
        "error": verdict.error,
        "version": state.version,
        "unfit": state.unfit(),
        "ranks": [asdict(report) for report in verdict.reports],
        **more,
    }
    return Answer(200 if verdict.ok else 500, told)


def session_error(verdict: EngineVerdict) -> str:
    """Why an update over vLLM's own routes has not brought a version to every rank; empty where it has."""
    if not verdict.ok:
        return verdict.error
    for report in verdict.reports:
        if report.last_load is None:
            return f"rank {report.rank}: no version was loaded in this update"
        if not report.last_load.ok:
            return f"rank {report.rank}: {report.last_load.error}"
    return verdict.torn
