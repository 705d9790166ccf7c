"""Driving the page with the system's Chromium, for the browser tests and the screenshots."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sglang_ext.core.refusal import Refusal

NAMES = ("chromium", "chromium-browser", "google-chrome")
READY_MS = 120_000
START_S = 120.0
RUN_MS = 900_000
#: Sets ``window.pressed`` once Stop is enabled or the banner says something, for however short a time.
_WATCH_RUN = """() => {
    window.pressed = false;
    const stop = document.querySelector('#stop'), banner = document.querySelector('#banner');
    const watch = (node, what, begun) => new MutationObserver(() => { window.pressed ||= begun() }).observe(node, what);
    watch(stop, {attributes: true, attributeFilter: ['disabled']}, () => true);
    watch(banner, {childList: true, subtree: true}, () => banner.querySelector('.banner') !== null);
}"""


def find_chromium() -> str | None:
    """Return the system's Chromium, ``None`` if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser and stop it at the end.

    Raises:
        Refusal: Playwright or Chromium is missing.
    """
    path = find_chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise Refusal(f"Playwright is missing ({error})", "it drives the browser", "pip install playwright") from error
    if path is None:
        raise Refusal("no Chromium was found", f"one of {', '.join(NAMES)} is needed", "apt-get install chromium")
    with sync_playwright() as playwright:
        # The sandbox needs privileges that containers often lack; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(*flags: str, port: int) -> Iterator[str]:
    """Run the demo and yield the page's address.

    Raises:
        RuntimeError: it does not come up.
    """
    process = subprocess.Popen([sys.executable, "-m", "demo", "--port", str(port), *flags])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the page did not come up at {url}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Page:
    """One open page of the demo.

    Args:
        page: Playwright's page.
        url: address of the demo.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#run", timeout=READY_MS)

    def wait_served(self) -> Page:
        """Wait until a prompt can be run."""
        self.page.wait_for_selector("#run:not([disabled])", timeout=READY_MS)
        return self

    def settings(self) -> Page:
        """Open the settings."""
        if not self.page.locator("#max-tokens").is_visible():
            self.page.click("#settings button")
            self.page.wait_for_selector("#max-tokens", state="visible")
        return self

    def prompt(self, text: str) -> Page:
        """Type a prompt."""
        self.page.fill("#prompt textarea", text)
        return self

    def number(self, name: str, value: float) -> Page:
        """Set a slider of the settings by its number box."""
        self.settings()
        box = self.page.locator(f"#{name} input[type=number]")
        box.fill(f"{value:g}")
        box.press("Tab")
        return self

    def choose(self, name: str, label: str) -> Page:
        """Choose a radio button of the settings by its exact label."""
        self.settings()
        self.page.locator(f"#{name} label", has_text=label).first.click()
        return self

    def run(self) -> Page:
        """Press Run and wait until the page has begun, or has said why it cannot: either may last an instant only."""
        self.page.evaluate(_WATCH_RUN)
        self.page.click("#run")
        self.page.wait_for_function("window.pressed", timeout=READY_MS)
        return self

    def wait_done(self) -> Page:
        """Wait until nothing streams and nothing is replayed."""
        self.page.wait_for_selector("#stop[disabled]", timeout=RUN_MS)
        self.page.wait_for_selector("#replay:not([disabled])", timeout=RUN_MS)
        return self

    def wait_steps(self, side: str, count: int) -> Page:
        """Wait until a panel shows ``count`` steps; ``side`` is ``plain`` or ``fast``."""
        self.page.wait_for_function(
            f"document.querySelector('#{side}-flow .flow').childElementCount >= {count}", timeout=RUN_MS
        )
        return self

    def figure(self, where: str, name: str) -> str:
        """Return a figure's text, by the part of the page and its name."""
        return str(self.page.locator(f"#{where} [data-name={name}]").first.inner_text())

    def answer(self, side: str) -> str:
        """Return the committed text of a panel, exactly."""
        script = "e => [...e.querySelectorAll('.t:not(.r)')].map(t => t.textContent).join('')"
        return str(self.page.locator(f"#{side}-flow .flow").evaluate(script))

    def tokens(self, side: str, kind: str) -> int:
        """Return how many tokens of a kind (``a``, ``b``, ``p``, ``r``) a panel shows."""
        return int(self.page.locator(f"#{side}-flow .t.{kind}").count())

    def saved(self) -> str:
        """Download the run and return the file's text."""
        with self.page.expect_download() as download:
            self.page.click("#save")
        with open(download.value.path(), encoding="utf-8") as file:
            return file.read()

    def open(self, file: str) -> Page:
        """Open a saved run."""
        with self.page.expect_file_chooser() as chooser:
            self.page.click("#open")
        chooser.value.set_files(file)
        return self
