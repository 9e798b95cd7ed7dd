"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. The main thread runs an event loop as long as it is open."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path is not None, "These tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """What a page did beside what is on it: its complaints, and where it sent requests."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, kind: str, text: str) -> None:
        # A request that fails is reported by the browser itself; what the page makes of it is tested.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.complaints.append(text)
