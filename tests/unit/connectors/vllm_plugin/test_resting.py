"""What waits in an engine: what the variable does to NIXL's agents and vLLM's queues."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from connectors.vllm_plugin.resting import rest_while_waiting

QUEUES = "vllm.distributed.device_communicators.shm_broadcast"


class Config:
    pthrDelay = 0


class Agent:
    def __init__(self, name: str, config: Config) -> None:
        self.name, self.delay = name, config.pthrDelay


class Condition:
    def __init__(self, address: str, busy_loop_s: float = 1) -> None:
        self.address, self.busy_loop_s = address, busy_loop_s
        self.waits: list[float | None] = []

    def wait(self, timeout_ms: float | None = None) -> None:
        self.waits.append(timeout_ms)


class OtherCondition:
    def __init__(self, address: str) -> None:
        self.address = address


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(nixlAgent=Agent, nixlAgentConfig=Config)
    install(monkeypatch, "nixl._api", nixlBind=found)
    return found


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, QUEUES, SpinCondition=Condition)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def test_agents_rest_for_as_long_as_the_variable_says(nixl: SimpleNamespace, queues: Any) -> None:
    rest_while_waiting("2500")
    agent = nixl.nixlAgent("a", Config())
    assert isinstance(agent, Agent)
    assert (agent.name, agent.delay) == ("a", 2500)


def test_queues_sleep_at_once_and_never_for_longer(nixl: SimpleNamespace, queues: Any) -> None:
    rest_while_waiting("2500")
    condition = queues.SpinCondition("ipc://a")
    for timeout_ms in (None, 1, 60_000):
        condition.wait(timeout_ms)
    condition.wait(timeout_ms=2)
    assert (condition.address, condition.busy_loop_s, condition.waits) == ("ipc://a", 0, [3, 1, 3, 2])


def test_a_plug_in_that_is_loaded_twice_changes_nothing_more(nixl: SimpleNamespace, queues: Any) -> None:
    rest_while_waiting("2500")
    classes = nixl.nixlAgent, queues.SpinCondition
    rest_while_waiting("2500")
    assert (nixl.nixlAgent, queues.SpinCondition) == classes


def test_what_looks_different_keeps_its_ways(
    nixl: SimpleNamespace, queues: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nixl.nixlAgentConfig, queues.SpinCondition = object, OtherCondition
    rest_while_waiting("2500")
    assert (nixl.nixlAgent, queues.SpinCondition) == (Agent, OtherCondition)
    assert caplog.text.count("polls without pause") == 2


@pytest.mark.parametrize("rest", ["0", "-1", "fast", "1.5", "²"])
def test_a_time_that_is_none_is_refused_by_name(rest: str) -> None:
    with pytest.raises(ValueError, match="HEADRACE_REST_US must be a whole number of microseconds above 0"):
        rest_while_waiting(rest)
