"""The web page with the demo model, as docs/page.png shows it: two turns, a tree with other people's branches, a request under way.

`RADIXPD_PAGE_PNG=docs/page.png` keeps the picture.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.browsing import CHROMIUM, NO_BROWSER, chromium, facts, opened, prompt_text, say
from e2e.servers import Server
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)]

TEACHER = "You are a helpful teacher. Keep every answer short."
GUIDE = "You are a guide for travellers. Name one place and say why it is worth a visit."
BEFORE = (
    (TEACHER, "Why is the sky blue?"),
    (TEACHER, "Why do cats purr?"),
    (TEACHER, "How do birds find their way?"),
    (TEACHER, "How do bees see colours?"),
    (TEACHER, "What is a whole number?"),
    (GUIDE, "I am in Rome for a day."),
    (GUIDE, "I am in Rome for a week."),
    (GUIDE, "Where can I swim in Spain?"),
)
MEANWHILE = "Tell me everything about the sea, its waves and its winds."
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    server = Server("demo", "--max-total-tokens", "8192")
    yield server
    assert server.close() == 0


def _ask(server: Server, system: str, question: str, **fields: object) -> int:
    """The status of somebody else's request."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 40, **fields}).status


def _converse(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill(TEACHER)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("120")
    page.get_by_text("Settings").click()
    say(page, "How do bees make honey?")
    say(page, "How long does that take?")


def test_two_turns_with_the_demo_model(demo: Server, tmp_path: Path) -> None:
    for system, question in BEFORE:
        assert _ask(demo, system, question) == 200
    with chromium() as browser, opened(browser, demo, viewport={"width": 1440, "height": 960}, device_scale_factor=1) as page:
        _converse(page)
        assert "bees" in page.locator(".said.model .text").first.inner_text().lower()
        cached = int(facts(page)["cached"].split(" ")[0])
        assert cached >= 0.6 * int(facts(page)["prompt tokens"])
        page.locator(".turn").last.locator(".prompt summary").click()
        assert prompt_text(page)[0].startswith(f"<|im_start|>system\n{TEACHER}<|im_end|>\n<|im_start|>user\nHow do bees make honey?")
        page.locator("#log").evaluate("e => { e.scrollTop = e.scrollHeight; }")
        expect(page.locator("#tree .bar.mine").nth(1)).to_be_visible()
        busy = threading.Thread(
            target=_ask, args=(demo, TEACHER, MEANWHILE), kwargs={"max_tokens": 400, "ignore_eos": True, "temperature": 1}
        )
        busy.start()
        try:
            expect(page.locator("#tree .bar.locked", has_text="everything about the sea")).to_be_visible()
            expect(page.locator("[data-owner=request] b")).not_to_have_text("0")
            page.locator("#tree .bar", has_text="the sky blue").hover()
            expect(page.locator("#node")).to_contain_text("sky blue")
            picture = tmp_path / "page.png"
            page.screenshot(path=picture)
        finally:
            demo.post("/abort_request", {"abort_all": True})
            busy.join()
    assert 10_000 < picture.stat().st_size < MOST_BYTES
    if kept := os.environ.get("RADIXPD_PAGE_PNG"):
        shutil.copy(picture, kept)
