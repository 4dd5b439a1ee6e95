"""The browser and what it looks at. Starting either takes longer than most tests here, so all of them share both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.integration.orchestrator.serve_process import Serve
from tests.stack.page.fleet import VIEWER, Fleet, running_fleet
from tests.stack.page.reader import Reader

SCREENSHOTS = Path(__file__).parents[3] / ".cache" / "screenshots"


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("page")) as fleet:
        fleet.push("step-100")
        fleet.push("step-200")
        yield fleet


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Serve]:
    """A control plane without a job."""
    serve = Serve(tmp_path)
    serve.environment["HEADRACE_VIEWER_TOKEN"] = VIEWER
    try:
        serve.start()
        yield serve
    finally:
        serve.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "the page is tested in Chromium: apt-get install -y --no-install-recommends chromium"
    # Its sandbox refuses to be set up by root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def reader(browser: Browser) -> Iterator[Callable[..., Reader]]:
    """Opens the page at an address, by default without a token. What browsers complain of fails the test."""
    readers: list[Reader] = []

    def look(url: str, *, token: str = "", scheme: str = "light", width: int = 1440) -> Reader:
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light", viewport={"width": width, "height": 900}
        )
        page: Page = context.new_page()
        readers.append(Reader(page, url, SCREENSHOTS))
        readers[-1].open(token)
        return readers[-1]

    yield look
    complaints = [complaint for each in readers for complaint in each.complaints]
    for each in readers:
        each.page.context.close()
    assert complaints == []
