"""What the fence decides: routes, requests, pauses, and commands to confirm an epoch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from connectors.vllm_plugin.fence_rules import Answer, Command, FenceState, Order, RouteKind, route_kind

RIGHT = {b"x-headrace-instance": b"life-1", b"x-headrace-epoch": b"5", b"x-headrace-salted": b"1"}


def confirmed(**changes: Any) -> FenceState:
    return FenceState(instance="life-1", epoch=5, order=(3, 0, 2), **changes)


def headers(**changes: str | None) -> dict[bytes, bytes]:
    """Right ones, with the named one changed or, where None, left out."""
    changed = {f"x-headrace-{name}".encode(): value for name, value in changes.items()}
    return {
        name: changed[name].encode() if changed.get(name) else value  # type: ignore[union-attr]
        for name, value in RIGHT.items()
        if changed.get(name, "") is not None
    }


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/health", "health"),
        ("GET", "/metrics", "token_only"),
        ("GET", "/v1/models", "token_only"),
        ("POST", "/tokenize", "token_only"),
        ("POST", "/collective_rpc", "vllm_weights"),
        ("POST", "/update_weights", "vllm_weights"),
        ("GET", "/update_weights", "generating"),
        ("POST", "/weights/load", "weights"),
        ("GET", "/weights/state", "weights"),
        ("POST", "/init_weight_transfer_engine", "token_only"),
        ("POST", "/inference/v1/abort_requests", "token_only"),
        ("POST", "/sleep", "discarding"),
        ("POST", "/weight_checker", "discarding"),
        ("POST", "/pause", "pause"),
        ("POST", "/resume", "resume"),
        ("GET", "/fence", "fence"),
        ("DELETE", "/fence", "fence"),
        ("POST", "/v1/completions", "generating"),
        ("POST", "/inference/v1/generate", "generating"),
        ("POST", "/v2/rerank", "generating"),
        ("POST", "/invocations", "generating"),
        ("POST", "/generative_scoring", "generating"),
        ("POST", "/v1/load_lora_adapter", "lora"),
        ("GET", "/v1/responses/r-1", "generating"),
        ("POST", "/of_a_later_version", "generating"),
        ("GET", "/of_a_later_version", "generating"),
        ("PUT", "/pause", "generating"),
        ("POST", "/health", "generating"),
        ("GET", "/health/", "generating"),
        ("GET", "//health", "generating"),
        ("GET", "/HEALTH", "generating"),
        ("OPTIONS", "/v1/completions", "generating"),
    ],
)
def test_a_route_that_is_not_known_counts_as_generating(method: str, path: str, kind: RouteKind) -> None:
    assert route_kind(method, path) == kind


def test_a_request_of_this_life_and_epoch_passes() -> None:
    assert confirmed().refusal(RIGHT) is None


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        (headers(instance="life-0"), "x-headrace-instance", "is 'life-0', this instance is life-1"),
        (headers(instance=None), "x-headrace-instance", "is missing, this instance is life-1"),
        (headers(epoch="4"), "x-headrace-epoch", "is '4', the confirmed epoch is 5"),
        (headers(epoch="05"), "x-headrace-epoch", "is '05'"),
        (headers(epoch="5.0"), "x-headrace-epoch", "is '5.0'"),
        (headers(epoch=None), "x-headrace-epoch", "is missing, the confirmed epoch is 5"),
        (headers(salted=None), "x-headrace-salted", "only salted requests"),
        (headers(salted="true"), "x-headrace-salted", "only salted requests"),
    ],
)
def test_what_differs_is_named(given: dict[bytes, bytes], param: str, says: str) -> None:
    refusal = confirmed().refusal(given)
    assert refusal is not None
    assert refusal.status == 503
    assert (b"retry-after", b"1") in refusal.headers
    assert refusal.content["error"] == {
        "message": refusal.content["error"]["message"],
        "type": "fenced",
        "param": param,
        "code": 503,
    }
    assert says in refusal.content["error"]["message"]


def test_all_that_differs_is_said_at_once() -> None:
    refusal = confirmed(paused=True).refusal({})
    assert refusal is not None
    for word in ("x-headrace-instance", "x-headrace-epoch", "x-headrace-salted", "paused"):
        assert word in refusal.content["error"]["message"]


def test_an_engine_boots_closed() -> None:
    refusal = FenceState(instance="life-1").refusal(headers(epoch="None"))
    assert refusal is not None
    assert "no epoch is confirmed here" in refusal.content["error"]["message"]


def test_a_pause_holds_until_a_resume_that_came_after_it() -> None:
    state = confirmed()
    state.pause_received()
    assert state.refusal(RIGHT) is not None
    resume_of_the_first = state.pauses
    state.pause_received()
    state.resumed(resume_of_the_first)
    assert state.refusal(RIGHT) is not None
    state.resumed(state.pauses)
    assert state.refusal(RIGHT) is None


def test_open_requests_are_listed_until_they_end_also_two_of_one_name() -> None:
    state = confirmed()
    first, second, third = (state.accept(name) for name in ("a", "b", "a"))
    assert state.view()["open_requests"] == ["a", "b", "a"]
    state.end(first)
    state.end(second)
    assert state.view()["open_requests"] == ["a"]
    state.end(third)
    assert state.view()["open_requests"] == []


def command(order: Order, epoch: int | None = 6, instance: str = "life-1", **more: Any) -> bytes:
    update, attempt, step = order
    body = {"instance": instance, "epoch": epoch, "update": update, "attempt": attempt, "step": step, **more}
    return json.dumps(body).encode()


def obey(state: FenceState, body: bytes) -> Answer:
    """With ranks that are where they should be at once."""
    received = state.receive(body)
    if isinstance(received, Answer):
        return received
    state.confirm(received)
    return Answer(200, state.view())


@pytest.mark.parametrize("order", [(3, 0, 3), (3, 1, 0), (4, 0, 0)])
@pytest.mark.parametrize("epoch", [6, 5, None])
def test_a_later_command_confirms_or_withdraws(order: Order, epoch: int | None) -> None:
    state = confirmed()
    answer = obey(state, command(order, epoch))
    assert (answer.status, answer.content) == (200, state.view())
    assert (state.epoch, state.order) == (epoch, order)


@pytest.mark.parametrize("order", [(3, 0, 1), (2, 9, 9), (0, 0, 0)])
def test_an_older_command_is_refused_with_both(order: Order) -> None:
    state = confirmed()
    answer = obey(state, command(order))
    assert answer.status == 409
    assert (answer.content["given"], answer.content["accepted"]) == (list(order), [3, 0, 2])
    assert state == confirmed()


def test_an_equal_command_changes_nothing_and_must_say_the_same() -> None:
    state = confirmed()
    assert obey(state, command((3, 0, 2), epoch=5)).status == 200
    other = obey(state, command((3, 0, 2), epoch=6))
    assert (other.status, other.content["error"]["param"]) == (409, "epoch")
    assert state == confirmed()


def test_between_two_epochs_there_is_none() -> None:
    state = confirmed()
    received = state.receive(command((4, 0, 0), epoch=6))
    assert (state.epoch, state.order) == (None, (4, 0, 0))
    assert isinstance(received, Command)
    state.confirm(received)
    assert state.epoch == 6


def test_the_same_epoch_stays_open_while_it_is_confirmed_again() -> None:
    state = confirmed()
    state.receive(command((4, 0, 0), epoch=5))
    assert state.epoch == 5


def test_what_was_overtaken_confirms_nothing() -> None:
    state = confirmed()
    overtaken = state.receive(command((4, 0, 0), epoch=6))
    state.receive(command((4, 0, 1), epoch=None))
    assert isinstance(overtaken, Command)
    state.confirm(overtaken)
    assert state.epoch is None


def test_a_command_to_another_life_is_refused() -> None:
    state = confirmed()
    answer = obey(state, command((9, 0, 0), instance="life-0"))
    assert (answer.status, answer.content["error"]["param"]) == (409, "instance")
    assert "'life-0'" in answer.content["error"]["message"]
    assert state == confirmed()


def test_the_first_command_may_be_of_order_zero() -> None:
    state = FenceState(instance="life-1")
    assert state.view()["order"] is None
    assert obey(state, command((0, 0, 0), epoch=1)).content["order"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xff", "body"),
        (b"[1]", "body"),
        (b"[" * 2000, "body"),
        (b"1" * 4097, "body"),
        (b"{}", "instance"),
        (command((1, 0, 0), instance=7), "instance"),  # type: ignore[arg-type]
        (command((1, 0, 0), epoch=-1), "epoch"),
        (command((1, 0, 0), epoch="6"), "epoch"),  # type: ignore[arg-type]
        (command((1, 0, 0), epoch=True), "epoch"),
        (command((-1, 0, 0)), "update"),
        (command((10**19, 0, 0)), "update"),
        (command((1, 0, 0), epoch=10**19), "epoch"),
        (command((1, 0.5, 0)), "attempt"),  # type: ignore[arg-type]
        (command((1, 0, None)), "step"),  # type: ignore[arg-type]
        (command((1, 0, 0), salt="x"), "salt"),
        (b'{"instance": "life-1", "epoch": 6, "update": 9, "attempt": 0}', "step"),
    ],
)
def test_a_body_that_is_no_command_names_the_field(body: bytes, field: str) -> None:
    state = confirmed()
    answer = obey(state, body)
    assert (answer.status, answer.content["error"]["param"]) == (400, field)
    assert state == confirmed()


def test_labels() -> None:
    assert FenceState(instance="life-1").labels() == [(b"x-headrace-instance", b"life-1")]
    assert confirmed().labels() == [(b"x-headrace-instance", b"life-1"), (b"x-headrace-epoch", b"5")]
