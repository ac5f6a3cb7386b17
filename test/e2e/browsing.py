"""The web page in a headless browser, as tests use it: opening it, saying something, reading what it shows.

Every page is watched: an error in its console, an exception, or a request to any other host fails the test. Requests of the page are its
own; where a test needs an answer of a certain length, what the model may write is fixed on the way to the server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.servers import ASCII_BIAS, Server
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

__all__ = ["CHROMIUM", "NO_BROWSER", "SYSTEM", "answer", "chromium", "facts", "force", "opened", "prompt_text", "say", "settle"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "no chromium on this machine: the web page is not tested"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
PATIENCE = 20_000  # milliseconds
SYSTEM = "Answer as short as you can, and do not forget what was said before."

expect.set_options(timeout=PATIENCE)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, server: Server, *, fault: str | None = None, ready: bool = True, **options: Any) -> Iterator[Page]:
    """The page of a server; a `fault` is what the browser's console may say because the test brings it about."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    errors: list[str] = []
    outside: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(server.url + "/") else outside.append(request.url))
    page.goto(server.url + "/")
    if ready:
        expect(page.locator("#model")).not_to_be_empty()
    yield page
    assert outside == []
    assert [text for text in errors if fault is None or fault not in text] == []
    context.close()


def force(page: Page, **fields: Any) -> None:
    """Every answer from now on has the fields added to its request."""

    def add(route: Route) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data or ""), **fields}))

    page.unroute("**/v1/*completions")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/completions", add)
    page.route("**/v1/chat/completions", add)


def settle(page: Page, *, system: str = SYSTEM, tokens: int = 24) -> None:
    """Settings of a short conversation that is the same each time."""
    page.get_by_text("Settings").click()
    if page.locator("#system").is_visible():
        page.get_by_label("System prompt").fill(system)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill(str(tokens))
    force(page, ignore_eos=True, logit_bias=ASCII_BIAS)


def say(page: Page, text: str) -> None:
    """Type and click, and wait until the answer and its prompt are there."""
    turns = page.locator(".turn").count()
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn")).to_have_count(turns + 1)
    expect(page.locator(".turn").last.locator(".prompt")).to_be_attached()


def facts(page: Page) -> dict[str, str]:
    """The figures under the newest answer."""
    shown = page.locator(".turn").last.locator(".facts li")
    return {str(item.get_attribute("data-fact")): item.locator("b").inner_text() for item in shown.all()}


def prompt_text(page: Page) -> tuple[str, str]:
    """Cached and computed text of the newest prompt, which must be open."""
    shown = page.locator(".turn").last.locator(".prompt pre")
    return shown.locator(".cached").inner_text(), shown.locator(".computed").inner_text()


def answer(page: Page) -> str:
    return str(page.locator(".said.model .text").last.text_content())
