"""How a control plane is reached from its own machine."""

from __future__ import annotations

import pytest

from orchestrator.store.listening import listening_at


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8700"),
        ("localhost", "http://localhost:8700"),
        ("0.0.0.0", "http://127.0.0.1:8700"),
        ("::", "http://[::1]:8700"),
        ("10.0.0.7", "http://10.0.0.7:8700"),
        ("", "http://127.0.0.1:8700"),
    ],
)
def test_it_is_reached_at(host: str, url: str) -> None:
    assert listening_at(host, 8700).url == url


def test_each_life_has_a_token_of_its_own() -> None:
    assert listening_at("::1", 1).token != listening_at("::1", 1).token
