"""A reader of the page in a browser: by keyboard, with an eye on what the browser complains of."""

from __future__ import annotations

from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page, Request

WAIT_MS = 60_000
"""On a machine that does much else."""
MOST_STOPS = 60
TALL = 6000
FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const name = at.getAttribute("aria-label") ?? at.labels?.[0]?.textContent ?? at.textContent.trim();
  const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return at === document.body ? null : [name, isSeen];
}"""


class Reader:
    def __init__(self, page: Page, url: str, screenshots: Path) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        """Errors on the console, exceptions, and calls to anywhere else."""
        self._screenshots = screenshots
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._see)

    def open(self, token: str) -> None:
        self.page.goto(self.url)
        if token:
            self.sign_in(token)

    def sign_in(self, token: str) -> None:
        self.page.get_by_label("API token").wait_for()
        assert self.focused() == "API token"
        self.page.keyboard.type(token)
        self.page.keyboard.press("Enter")

    def see(self, text: str, within: str = "main") -> None:
        """Wait until it stands there."""
        self.page.locator(within).get_by_text(text).first.wait_for()

    def focused(self) -> str | None:
        found = self.page.evaluate(FOCUSED)
        return None if found is None else str(found[0])

    def stops(self) -> list[str]:
        """All that the tab key leads to from here, to the end of the page; each shows that it has the focus."""
        names: list[str] = []
        for _ in range(MOST_STOPS):
            self.page.keyboard.press("Tab")
            found = self.page.evaluate(FOCUSED)
            if found is None:
                return names
            name, is_seen = found
            assert is_seen, f"{name} has the focus and does not show it"
            names.append(name)
        raise AssertionError(f"the tab key does not lead out of {names}")

    def tab_to(self, name: str) -> None:
        for _ in range(MOST_STOPS):
            if self.focused() == name:
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the tab key does not lead to {name}")

    def barriers(self) -> list[str]:
        """What axe-core finds that keeps somebody from reading the page: contrasts too low among them, or not known."""
        size = self.page.viewport_size
        assert size is not None
        # Where a scrolled row is cut off, no contrast is computed.
        self.page.set_viewport_size({"width": size["width"], "height": TALL})
        found = Axe().run(self.page).response
        self.page.set_viewport_size(size)
        assert any(rule["id"] == "color-contrast" for rule in found["passes"])
        rules = [*found["violations"], *(rule for rule in found["incomplete"] if rule["id"] == "color-contrast")]
        return [f"{rule['id']}: {node['html']} {node['failureSummary']}" for rule in rules for node in rule["nodes"]]

    def picture(self, name: str) -> None:
        """Keep a screenshot of the whole page."""
        self._screenshots.mkdir(parents=True, exist_ok=True)
        path = self._screenshots / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        print(path)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _see(self, request: Request) -> None:
        if not request.url.startswith(self.url.partition("page/")[0]):
            self.complaints.append(f"asks {request.url}")
        if "token" in request.url and not request.url.endswith("/token.js"):
            self.complaints.append(f"a token in {request.url}")
