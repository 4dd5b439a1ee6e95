"""Who is given a token, and where `headrace serve` refuses to listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from orchestrator.cli_serve import AddressUnusable, given_tokens, listen, run_server
from orchestrator.store.tokens import TokensRefused
from tests.fakes.fake_launch import FakeFleet


def test_tokens_of_the_environment_are_taken_out_of_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('of_file = "viewer"\n')
    file.chmod(0o600)
    environment = {
        "HEADRACE_API_TOKEN": "a",
        "HEADRACE_TRAINER_TOKEN": "t",
        "HEADRACE_VIEWER_TOKEN": "",
        "PATH": "/bin",
    }
    assert given_tokens(file, environment) == {"of_file": "viewer", "a": "admin", "t": "trainer"}
    assert environment == {"PATH": "/bin"}
    assert given_tokens(None, environment) == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "head-node", ""])
def test_a_public_address_without_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for variable in ("HEADRACE_API_TOKEN", "HEADRACE_TRAINER_TOKEN", "HEADRACE_VIEWER_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(TokensRefused, match="give tokens with --tokens or HEADRACE_API_TOKEN"):
        run_server(FakeFleet(tmp_path).service(), tmp_path, host, 8700, tokens=None)


def test_a_port_that_is_taken_is_named_with_what_mends_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnusable) as refused:
            listen("127.0.0.1", port)
    expected = "Address already in use; another program listens there: end it, or give this one another --port"
    assert str(refused.value) == f"--host 127.0.0.1 --port {port}: {expected}"


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressUnusable, match=r"--host 203\.0\.113\.1 --port 8700: .*give an address of this machine"):
        listen("203.0.113.1", 8700)
