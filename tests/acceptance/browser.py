"""Chromium for the tests of the page, driven by Playwright; axe-core, which looks for what keeps people out."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

REQUIRED = "FARM_REQUIRE_CHROMIUM"
_AXE = pathlib.Path(__file__).with_name("axe") / "axe.min.js"
# A machine that runs other things as well draws slowly.
_PATIENCE_MS = 60_000.0
# axe's impacts that keep a user from using a page.
_SERIOUS = ("serious", "critical")


class Browser:
    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url.rstrip("/")
        self.complaints: list[str] = []
        page.set_default_timeout(_PATIENCE_MS)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", lambda request: self.complaints.append(f"{request.url}: {request.failure}"))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.url}{path}")
        self.page.wait_for_selector("#live:not(.off)")
        return self.page

    def list_complaints(self) -> list[str]:
        """What was wrong since the last call; requests that end as a page is left are not."""
        left = ("/live", "net::ERR_ABORTED")
        found = [each for each in self.complaints if not any(word in each for word in left)]
        self.complaints = []
        return found

    def list_barriers(self) -> list[str]:
        """What axe-core finds serious on the page. Run through the debugger: the page itself lets no such code in."""
        self.page.evaluate(_AXE.read_text() + "\n;0")
        found = self.page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
        return [
            f"{each['id']}: {json.dumps(each['nodes'][0]['html'])[:200]}"
            for each in found
            if each["impact"] in _SERIOUS
        ]


@contextlib.contextmanager
def open_browser(url: str) -> Iterator[Browser]:
    """A browser on the farm's page. Skips without chromium; fails where FARM_REQUIRE_CHROMIUM is set."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and there is no chromium")
        pytest.skip("there is no chromium (Debian: the package chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield Browser(browser.new_context(viewport={"width": 1440, "height": 900}).new_page(), url)
        finally:
            browser.close()
