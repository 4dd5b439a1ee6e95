"""The web page's files: packaged, served to anybody under a strict policy, and sufficient to themselves."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.access import Access
from orchestrator.api.routes_page import FOLDER
from orchestrator.api.server import build_app
from tests.fakes.fake_launch import FakeFleet

ROOT = Path(__file__).parents[3]
FILES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": ("text/javascript", "application/javascript"),
    ".svg": "image/svg+xml",
}
MARKUP_SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|\.cssText"


@pytest.fixture
def api(tmp_path: Path, serve: Callable[[Any], httpx.Client]) -> httpx.Client:
    return serve(build_app(FakeFleet(tmp_path).service(), Access({"known": "viewer"})))


@pytest.mark.parametrize("name", FILES)
def test_a_file_needs_no_token_and_comes_under_the_policy(api: httpx.Client, name: str) -> None:
    reply = api.get(f"/page/{name}")
    assert reply.status_code == 200
    assert reply.content == (FOLDER / name).read_bytes()
    assert reply.headers["content-type"].startswith(TYPES[Path(name).suffix])
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    again = api.get(f"/page/{name}", headers={"if-none-match": reply.headers["etag"]})
    assert again.status_code == 304


def test_the_address_alone_leads_to_the_page(api: httpx.Client) -> None:
    reply = api.get("/", follow_redirects=True)
    assert (reply.status_code, reply.url.path) == (200, "/page/")
    assert reply.text == (FOLDER / "index.html").read_text()


@pytest.mark.parametrize(
    "path", ["/page/no-such.js", "/page/../access.py", "/page/%2e%2e/access.py", "/page/..%2faccess.py"]
)
def test_nothing_else_is_to_be_had_there(api: httpx.Client, path: str) -> None:
    reply = api.get(path)
    # A client may take the dots for a path of its own, which asks for a token.
    assert reply.status_code in (401, 404)
    assert reply.headers["content-type"] == "application/problem+json"


def test_the_page_uses_nothing_from_elsewhere_and_makes_no_markup_of_texts() -> None:
    for name in FILES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.", text), name
        assert not re.search(MARKUP_SINKS, text), name
    assert not re.search(r"<script(?![^>]* src=)|<style| on[a-z]+=| style=", (FOLDER / "index.html").read_text())


def test_a_wheel_has_all_files(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        inside = {name for name in built.namelist() if name.startswith("orchestrator/api/page/")}
    assert inside == {f"orchestrator/api/page/{name}" for name in FILES}
