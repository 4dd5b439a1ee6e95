from __future__ import annotations

from typing import Any

import pytest

from connectors.engine_env import KEEP_ALIVE_S
from router.settings import EngineEndpoint, RouterSettings
from tests.unit.router.fleets import make_settings


def test_settings_refuse_what_can_not_work() -> None:
    twice = [{"name": "a", "role": "decode", "url": "http://a"}] * 2
    with pytest.raises(ValueError, match="engines: names must be unique, a"):
        make_settings(engines=twice)
    with pytest.raises(ValueError, match="handoff_margin_s"):
        make_settings(handoff_margin_s=30.0)
    assert isinstance(make_settings(), RouterSettings)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8200", "https://a", "HTTP://a", "http://", "http://:80", "http://a/", "http://a/v1", "http://a?b",
     "http://a#b", "http://me@a", "http://a b", "http://a\r\nb", "http://a:", "http://a:0", "http://a:65536", "http://a:b",
     "http://::1", "http://[::1"],
)  # fmt: skip
def test_an_engines_url_is_its_address_and_nothing_more(url: str) -> None:
    with pytest.raises(ValueError, match="must be http://HOST or http://HOST:PORT"):
        EngineEndpoint(name="a", role="decode", url=url)


@pytest.mark.parametrize("url", ["http://a", "http://node_1.local:8200", "http://10.0.0.1:65535", "http://[::1]:80"])
def test_addresses_of_engines(url: str) -> None:
    assert EngineEndpoint(name="a", role="decode", url=url).url == url


@pytest.mark.parametrize("name", ["handoff_lease_s", "request_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a10_a_lease_or_a_time_limit_of_0_or_less_is_refused(name: str, value: float) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        make_settings(**changes)


def test_a39_connecting_and_the_margin_fit_into_the_lease_together() -> None:
    times: dict[str, Any] = {"handoff_margin_s": 2.0, "connect_timeout_s": 4.0}
    assert make_settings(**times, handoff_lease_s=6.0).connect_timeout_s == 4.0
    with pytest.raises(ValueError, match=r"connect_timeout_s \(4\.0\) and handoff_margin_s \(2\.0\)"):
        make_settings(**times, handoff_lease_s=5.9)


def test_a16_idle_connections_are_dropped_before_the_engines_drop_them() -> None:
    assert make_settings(keepalive_s=4.0, engine_keepalive_s=4.1).keepalive_s == 4.0
    with pytest.raises(ValueError, match=r"keepalive_s \(5\.0\) must be below engine_keepalive_s \(5\.0\)"):
        make_settings(keepalive_s=5.0, engine_keepalive_s=5.0)


def test_a16_the_engines_are_started_with_the_keep_alive_that_the_router_reckons_with() -> None:
    assert make_settings().engine_keepalive_s == KEEP_ALIVE_S
