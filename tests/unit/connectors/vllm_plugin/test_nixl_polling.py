"""NIXL's polling: what the variable does to the agents that an engine makes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from connectors.vllm_plugin.nixl_polling import rest_between_polls


class Config:
    pthrDelay = 0


class Agent:
    def __init__(self, name: str, config: Config) -> None:
        self.name, self.delay = name, config.pthrDelay


def install_nixl(monkeypatch: pytest.MonkeyPatch, **bindings: Any) -> SimpleNamespace:
    module = ModuleType("nixl._api")
    found = SimpleNamespace(**bindings)
    monkeypatch.setattr(module, "nixlBind", found, raising=False)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)
    return found


def test_agents_rest_for_as_long_as_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = install_nixl(monkeypatch, nixlAgent=Agent, nixlAgentConfig=Config)
    rest_between_polls("250")
    rest_between_polls("250")
    agent = nixl.nixlAgent("a", Config())
    assert (agent.name, agent.delay) == ("a", 250)
    assert isinstance(agent, Agent)
    assert type(agent).__mro__.index(Agent) == 1, "wrapped once, however often vLLM loads the plug-in"


@pytest.mark.parametrize("bindings", [{}, {"nixlAgent": Agent, "nixlAgentConfig": object}])
def test_another_nixl_keeps_its_ways(
    monkeypatch: pytest.MonkeyPatch, bindings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    nixl = install_nixl(monkeypatch, **bindings)
    rest_between_polls("250")
    assert vars(nixl) == bindings
    assert "polls without pause" in caplog.text


@pytest.mark.parametrize("delay", ["0", "-1", "fast", "1.5", "²"])
def test_a_delay_that_is_none_is_refused_by_name(delay: str) -> None:
    with pytest.raises(ValueError, match="HEADRACE_NIXL_POLL_US must be a whole number of microseconds above 0"):
        rest_between_polls(delay)
