"""A real browser for the console's tests: the system's Chromium, driven by Playwright, and axe-core.

Law: a page that requests anything of another host, or logs an error, fails its test.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from meshd.server.console.static_files import DIRECTORY
from tests.support.required import missing, required_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

ROOT: Final = Path(__file__).resolve().parents[2]
AXE: Final = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM: Final = "/usr/bin/chromium"
SCREENSHOTS: Final = "MESH_TEST_SCREENSHOTS"
"""Names a folder for screenshots of every page; without it none are made."""


def require_console() -> None:
    """A built console, and a browser to look at it."""
    if not os.access(CHROMIUM, os.X_OK):
        missing("chromium", "apt-get install chromium")
    required_module("playwright.sync_api")
    if not (DIRECTORY / "index.html").exists() or not AXE.exists():
        missing("console", "make console")


class Browser:
    """A browser context of one person. `trouble` collects what no page may do."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.context, self.endpoint = context, endpoint
        self.trouble: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(90_000)  # a machine that is busy is no failure
        self.page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("request", self._requested)
        self.page.on("dialog", self._asked)

    def _said(self, message: Any) -> None:
        # The browser reports each status from 400 on as an error of loading.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.trouble.append(f"console: {message.text}")

    def _requested(self, request: Any) -> None:
        where = urlsplit(request.url)
        if where.scheme not in ("blob", "data") and where.netloc != urlsplit(self.endpoint).netloc:
            self.trouble.append(f"request: {request.url}")

    def _asked(self, dialog: Any) -> None:
        self.trouble.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def sign_in(self, access_key: str, secret_key: str) -> None:
        """Open the console and sign in; returns when the overview is there."""
        self.page.goto(f"{self.endpoint}/console")
        self.page.fill("[name=access]", access_key)
        self.page.fill("[name=secret]", secret_key)
        self.page.click("button[type=submit]")
        self.page.wait_for_selector("nav[aria-label=Pages]")

    def show(self, address: str, selector: str) -> None:
        """Go to a page of the console and wait for an element of it."""
        self.page.goto(f"{self.endpoint}/-/console/#{address}")
        self.page.wait_for_selector(selector)

    def await_order(self) -> None:
        """Wait until the overview has nothing to tell but how full the machine's disks are."""
        self.page.wait_for_function(
            """() => {
                const state = document.querySelector("section[aria-label=State]");
                const alerts = [...(state?.querySelectorAll("li") ?? [])].map((each) => each.textContent);
                return state && alerts.every((text) => /^The disks of .+ are .+ full: plan to/.test(text));
            }"""
        )

    def violations(self) -> list[str]:
        """What axe-core finds wrong with the page (WCAG 2.2, levels A and AA)."""
        if not self.page.evaluate("() => 'axe' in window"):  # the console is one document
            self.page.evaluate(AXE.read_text())
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        found = self.page.evaluate("tags => axe.run({runOnly: tags})", tags)
        return [
            f"{each['id']}: {node['html'][:200]}" for each in found["violations"] for node in each["nodes"]
        ]

    def screenshot(self, name: str) -> None:
        """Keep a picture of the page, if that is asked for."""
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@contextmanager
def running_chromium() -> Iterator[Any]:
    """The browser itself; `open_browser` opens it for a person."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def open_browser(chromium: Any, daemon: Daemon, **options: Any) -> Iterator[Browser]:
    """Windows of one person; `options` go to Playwright's `new_context` (color_scheme, viewport)."""
    context = chromium.new_context(**options)
    try:
        browser = Browser(context, daemon.endpoint)
        yield browser
        assert browser.trouble == []
    finally:
        context.close()
