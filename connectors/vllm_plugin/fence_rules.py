"""What an engine's fence lets pass, as plain state: no IO, no clock. `fence.py` puts it in front of vLLM's API server.

Loaded by the engine's interpreter, so only the standard library is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs

TOKEN_FILE_VARIABLE = "HEADRACE_TOKEN_FILE"
"""Environment variable that names the file with the job's bearer token."""
INSTANCE_VARIABLE = "HEADRACE_INSTANCE"
"""Environment variable that names this life of the engine, for whoever starts each life with a name of its own."""

INSTANCE_HEADER = "x-headrace-instance"
EPOCH_HEADER = "x-headrace-epoch"
SALTED_HEADER = "x-headrace-salted"
"""Says "1" where the body carries the salt of its epoch: stale routers, probes and warm-ups do not send it."""
ORDER_HEADER = "x-headrace-order"
"""Of a pause or a resume, "update.attempt.step": vLLM's own routes have no body for it."""
HANDOFFS_HEADER = "x-headrace-handoffs"
"""Of a pause: `drop` where no leg is left that could read a handoff of this engine."""

RETRY_AFTER_S = 1
LONGEST_COMMAND = 4096
"""Bytes of a body of POST /fence."""

_MOST = 10**18
"""Of a number in a command. `pool_keys.py` reads no longer one from a salt."""
_ORDER = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9]{1,18})")
Order = tuple[int, int, int]
"""(update, attempt, step) of a command. Later commands compare greater."""
Headers = Mapping[bytes, bytes]
RouteKind = Literal[
    "generating",
    "token_only",
    "pause",
    "resume",
    "fence",
    "weights",
    "vllm_weights",
    "discarding",
    "health",
    "lora",
]

FENCE_PATH = "/fence"
WEIGHTS_PATH = "/weights/"
VLLM_WEIGHTS = frozenset(
    {
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/collective_rpc",
    }
)
"""vLLM's own routes by which weights or what ranks answer can change."""
_SLEEP, _CHECKER = "/sleep", "/weight_checker"
_LORA = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_OBSERVATION = (
    "/ping /metrics /version /load /v1/models /openapi.json /is_paused /is_sleeping /server_info /weight_info"
    " /get_world_size /tokenizer_info /kv_event_sources /fault_tolerance/status"
)
_CONTROL = (
    "/ping /tokenize /detokenize /abort_requests /inference/v1/abort_requests"
    " /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /wake_up /release_kv_cache_memory"
    " /init_weight_transfer_engine /shutdown_weight_transfer_engine"
    " /start_profile /stop_profile /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply"
)
_TOKEN_ONLY = {"GET": frozenset(_OBSERVATION.split()), "POST": frozenset(_CONTROL.split())}
"""Routes that look at the engine or control it and compute no tokens. Every other route counts as generating, those
included that a later vLLM adds."""


def route_kind(method: str, path: str) -> RouteKind:
    if path == FENCE_PATH:
        return "fence"
    if path.startswith(WEIGHTS_PATH):
        return "weights"
    if path in _LORA:
        return "lora"
    if method == "POST" and path in VLLM_WEIGHTS:
        return "vllm_weights"
    if method == "POST" and path in (_SLEEP, _CHECKER):
        return "discarding"
    if (method, path) == ("GET", "/health"):
        return "health"
    if (method, path) == ("POST", "/pause"):
        return "pause"
    if (method, path) == ("POST", "/resume"):
        return "resume"
    return "token_only" if path in _TOKEN_ONLY.get(method, ()) else "generating"


@dataclass(frozen=True)
class Answer:
    """A reply of the fence's own."""

    status: int
    content: dict[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()


def error_answer(status: int, kind: str, message: str, *, param: str | None = None, **more: object) -> Answer:
    """An error as OpenAI writes it, with `more` beside it."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    if status == 503:
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    return Answer(status, {"error": error, **more}, headers)


def discard_refusal(path: str, query: bytes, body: bytes) -> Answer | None:
    """Why a request of a discarding route must not pass: asked so, it throws the weights away, and the engine would go
    on in its epoch without them. None where it leaves them alone."""
    if path == _SLEEP:
        is_harmless = set(parse_qs(query.decode("latin-1")).get("level", ())) <= {"0", "1"}
        message = "asleep at level 0 or 1 the engine keeps its weights; at any other it does not, and no epoch says so"
    else:
        is_harmless = _checked_action(body) in ("checksum", "compare")
        message = "weights are checked here by checksum or compare; reset zeroes them, and no epoch says so"
    return None if is_harmless else error_answer(403, "permission_error", message)


def _checked_action(body: bytes) -> object:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data.get("action") if isinstance(data, dict) else None


class CommandInvalid(Exception):
    """The body of POST /fence is none; `field` is what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


@dataclass(frozen=True)
class Command:
    """Body of POST /fence."""

    instance: str
    epoch: int | None
    """None withdraws the epoch."""
    order: Order


def read_command(body: bytes) -> Command:
    """Raises `CommandInvalid`."""
    data = read_fields(body, required=("epoch",), optional=(), at_most=LONGEST_COMMAND)
    epoch = None if data["epoch"] is None else _whole_number(data, "epoch")
    return Command(data["instance"], epoch, order_of(data))


def read_fields(body: bytes, *, required: Sequence[str], optional: Sequence[str], at_most: int) -> dict[str, Any]:
    """The object that a command is, with its instance and order beside its own fields. Raises `CommandInvalid`."""
    if len(body) > at_most:
        raise CommandInvalid("body", f"is longer than {at_most} bytes")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise CommandInvalid("body", "is not JSON") from None
    if not isinstance(data, dict):
        raise CommandInvalid("body", "is not a JSON object")
    for name in ("instance", *required, "update", "attempt", "step"):
        if name not in data:
            raise CommandInvalid(name, "is missing")
    for name in data:
        if name not in ("instance", *required, *optional, "update", "attempt", "step"):
            raise CommandInvalid(name, "is not a field of this command")
    if not isinstance(data["instance"], str):
        raise CommandInvalid("instance", "is not a string")
    order_of(data)
    return data


def order_of(data: dict[str, Any]) -> Order:
    """Raises `CommandInvalid`."""
    return _whole_number(data, "update"), _whole_number(data, "attempt"), _whole_number(data, "step")


def read_order(headers: Headers) -> Order | None:
    """What a pause or a resume carries; None where a person sent it. Raises `CommandInvalid`."""
    text = _text(headers, ORDER_HEADER)
    if text is None:
        return None
    match = _ORDER.fullmatch(text)
    if match is None:
        raise CommandInvalid(ORDER_HEADER, "is not update.attempt.step")
    return int(match[1]), int(match[2]), int(match[3])


def _whole_number(data: dict[str, Any], name: str) -> int:
    value = data[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise CommandInvalid(name, f"is not a whole number from 0 to {_MOST}")
    return value


@dataclass
class FenceState:
    """One life of an engine. It boots closed: nothing is generated before an epoch is confirmed."""

    instance: str
    epoch: int | None = None
    """The confirmed one."""
    order: Order | None = None
    """Of the last accepted command."""
    paused: bool = False
    pauses: int = 0
    """POST /pause received so far."""
    resumes: int = 0
    """POST /resume passed on so far."""
    open_requests: dict[int, str] = field(default_factory=dict)
    """X-Request-Id of each generating request that was accepted and has not ended."""
    accepted: int = 0
    """Generating requests so far; numbers them, since two may carry one X-Request-Id."""
    version: str | None = None
    """Of the weights, where a load of ours brought them."""
    weights_command: str = ""
    """What is being done on all ranks now, most often to the weights; empty while nothing is."""
    torn: str = ""
    """Why the parameters are no version's; empty where they are whole. A load that succeeds mends it."""
    stale: str = ""
    """Why something that other weights computed may still be kept; empty where nothing is. A load that succeeds mends
    it."""
    lost: str = ""
    """Why this life of the engine cannot be trusted any more. Nothing mends it."""

    def refusal(self, headers: Headers) -> Answer | None:
        """Why a generating request with these headers must not run; None where it may."""
        found = self._differences(headers)
        if not found:
            return None
        message = f"refused by the engine's fence: {'; '.join(found.values())}"
        return error_answer(503, "fenced", message, param=next(iter(found)))

    def _differences(self, headers: Headers) -> dict[str, str]:
        """What differs -> in words."""
        found: dict[str, str] = {}
        if (instance := _text(headers, INSTANCE_HEADER)) != self.instance:
            found[INSTANCE_HEADER] = f"{INSTANCE_HEADER} {_said(instance)}, this instance is {self.instance}"
        epoch = _text(headers, EPOCH_HEADER)
        if self.epoch is None:
            found[EPOCH_HEADER] = f"{EPOCH_HEADER} {_said(epoch)}, no epoch is confirmed here"
        elif epoch != str(self.epoch):
            found[EPOCH_HEADER] = f"{EPOCH_HEADER} {_said(epoch)}, the confirmed epoch is {self.epoch}"
        if _text(headers, SALTED_HEADER) != "1":
            found[SALTED_HEADER] = f"{SALTED_HEADER} is not 1: only salted requests are served"
        if unfit := self.unfit():
            found["weights"] = unfit
        if self.paused:
            found["pause"] = "the engine is paused until POST /resume succeeds"
        return found

    def unfit(self) -> str:
        """Why this engine must not serve whatever comes; empty where it may."""
        if self.lost:
            return f"this life of the engine must end: {self.lost}"
        problem = self.torn or self.stale
        return f"no weights until a load succeeds: {problem}" if problem else ""

    def accept(self, request_id: str) -> int:
        """Note a generating request as open; `end` takes what this returns."""
        self.accepted += 1
        self.open_requests[self.accepted] = request_id
        return self.accepted

    def end(self, number: int) -> None:
        del self.open_requests[number]

    def pause_received(self) -> None:
        self.pauses += 1
        self.paused = True

    def resumed(self, pauses_before: int) -> None:
        """POST /resume succeeded; `pauses_before` is what `pauses` was when it was received. A pause that came since
        still holds."""
        if self.pauses == pauses_before:
            self.paused = False

    def view(self) -> dict[str, Any]:
        """Body of GET /fence."""
        return {
            "instance": self.instance,
            "epoch": self.epoch,
            "paused": self.paused,
            "open_requests": list(self.open_requests.values()),
            "order": None if self.order is None else list(self.order),
            "version": self.version,
            "unfit": self.unfit(),
            "lost": bool(self.lost),
            "running": self.weights_command,
        }

    def refused_move(self, headers: Headers) -> Answer | None:
        """Why a pause or resume with these headers must not be obeyed; None where it may, and then older commands
        come too late. Without an order it is a person's, and obeyed."""
        try:
            order = read_order(headers)
        except CommandInvalid as error:
            return error_answer(400, "invalid_request_error", str(error), param=error.field)
        if order is None:
            return None
        if conflict := self.conflict(_text(headers, INSTANCE_HEADER) or "", order):
            return conflict
        self.order = order
        return None

    def receive(self, body: bytes) -> Command | Answer:
        """Accept a POST /fence, or say why not. From then on the epoch is what both the old and the new one allow:
        `confirm` opens a new one, when the ranks are in it."""
        try:
            command = read_command(body)
        except CommandInvalid as error:
            return error_answer(400, "invalid_request_error", str(error), param=error.field)
        if conflict := self.conflict(command.instance, command.order):
            return conflict
        if command.epoch is not None:
            busy = f"{self.weights_command} is running" if self.weights_command else ""
            if problem := self.unfit() or busy:
                return error_answer(409, "conflict", problem, param="epoch")
        given = list(command.order)
        if command.order == self.order and command.epoch != self.epoch:
            message = f"the command {given} was accepted before with epoch {self.epoch}, and now says {command.epoch}"
            return error_answer(409, "conflict", message, param="epoch", given=given, accepted=given)
        self.order = command.order
        if self.epoch != command.epoch:
            self.epoch = None
        return command

    def confirm(self, command: Command) -> None:
        """All ranks are in the command's epoch: open it, unless another command has come since."""
        if self.order == command.order:
            self.epoch = command.epoch

    def conflict(self, instance: str, order: Order) -> Answer | None:
        """Why a command for this instance and of this order must not be obeyed; None where it may."""
        if instance != self.instance:
            message = f"instance is {_shown(instance)}, this instance is {self.instance}"
            return error_answer(409, "conflict", message, param="instance")
        if self.order is not None and order < self.order:
            given, accepted = list(order), list(self.order)
            message = f"the command is {given}, and {accepted} was accepted before: it comes too late"
            return error_answer(409, "conflict", message, param="update", given=given, accepted=accepted)
        return None

    def labels(self) -> list[tuple[bytes, bytes]]:
        """Headers of every reply."""
        labels = [(INSTANCE_HEADER.encode(), self.instance.encode())]
        if self.epoch is not None:
            labels.append((EPOCH_HEADER.encode(), b"%d" % self.epoch))
        return labels


def _text(headers: Headers, name: str) -> str | None:
    value = headers.get(name.encode())
    return None if value is None else value.decode("latin-1").strip()


def _said(value: str | None) -> str:
    return "is missing" if value is None else f"is {_shown(value)}"


def _shown(value: str) -> str:
    return repr(value[:64])
