"""The load balancer's status page in headless Chromium: the fleet and its decisions live, explanations, keys, faults."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.browsing import CHROMIUM, NO_BROWSER, chromium, opened
from e2e.pd import Front
from e2e.servers import Server, free_port, until
from playwright.sync_api import Browser, Error, Page, expect

REFUSED = "Failed to load resource"  # how the browser's console tells an answer that is not 2xx, or none
PROMPT = {"text": "The same beginning of every prompt, " * 4, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def front() -> Iterator[Callable[..., Front]]:
    """`front(*flags)`: a load balancer with these flags."""
    made: list[Front] = []

    def start(*flags: str) -> Front:
        port = free_port()
        command = [sys.executable, "-m", "radixpd.mini_lb", "--port", str(port), "--health-check-interval-secs", "0.1", *flags]
        made.append(Front(command, port, probe="/health"))
        return made[-1]

    yield start
    assert [each.close() for each in made] == [0] * len(made)


def figure(page: Page, name: str):
    return page.locator(f"[data-figure={name}] b")


def test_the_fleet_and_its_decisions_are_shown_live(browser: Browser, server: Server, front: Callable[..., Front]) -> None:
    lb = front("--worker-urls", server.url, "http://127.0.0.1:9")
    with opened(browser, lb, ready=False) as page:
        expect(page.locator("#status")).to_have_text("1 of 2 workers up")
        expect(page.locator("#policy")).to_have_text("kv_cost")
        rows = page.locator("#workers tbody tr")
        expect(rows.filter(has_text=server.url)).to_contain_text(re.compile(r"w1.*regular.*up"))
        expect(rows.filter(has_text="127.0.0.1:9").locator("[data-state=down]")).to_be_visible()
        expect(figure(page, "hit-rate")).to_have_text("unknown")
        for name in ("first", "second"):
            assert lb.post("/generate", PROMPT, headers={"X-Request-Id": name}).status == 200
        told = page.locator("#decisions tbody tr")
        expect(told).to_have_count(2)
        expect(told.first).to_contain_text("second")  # the newest
        expect(told.first.locator("[data-state=ok]")).to_be_visible()
        expect(told.first).to_contain_text("lowest estimate")
        share = int(figure(page, "hit-rate").inner_text().removesuffix(" %"))
        assert 30 <= share <= 99  # all but the last page of the second prompt
        cells = told.first.locator("td").all_inner_texts()
        assert int(cells[5]) > 0, cells


def test_a_decision_is_explained(browser: Browser, server: Server, front: Callable[..., Front]) -> None:
    lb = front("--worker-urls", server.url)
    assert lb.post("/generate", PROMPT, headers={"X-Request-Id": "why-me"}).status == 200
    with opened(browser, lb, ready=False) as page:
        page.get_by_role("button", name="why-me").click()
        why = page.get_by_role("dialog")
        expect(why).to_contain_text("why-me")
        expect(why.locator("tbody tr")).to_have_count(1)
        expect(why.locator("tbody tr")).to_contain_text(server.url)
        expect(why).to_contain_text("ok; status 200")
        why.get_by_role("button", name="Close").click()
        expect(why).to_be_hidden()
        # The table is drawn anew each second, but whoever is on a row stays there.
        page.get_by_role("button", name="why-me").focus()
        assert lb.post("/generate", PROMPT).status == 200
        expect(page.locator("#decisions tbody tr")).to_have_count(2)
        assert page.evaluate("document.activeElement.dataset.rid") == "why-me"


def test_markup_in_names_is_text(browser: Browser, server: Server, front: Callable[..., Front]) -> None:
    evil = "<img/src=x/onerror=window.evil=1>"
    lb = front("--worker-urls", server.url)
    assert lb.post("/generate", PROMPT, headers={"X-Request-Id": evil}).status == 200
    with opened(browser, lb, ready=False) as page:
        page.get_by_role("button", name=evil).click()
        expect(page.locator("#why-title")).to_have_text(evil)
        assert page.locator("main img, dialog img").count() == 0
        assert page.evaluate("window.evil") is None


def test_with_keys_the_page_asks_for_one(browser: Browser, server: Server, front: Callable[..., Front]) -> None:
    lb = front("--worker-urls", server.url, "--api-key", "key-of-ada")
    with browser.new_context() as stranger, pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
        stranger.new_page().goto(lb.url + "/")
    login = {"username": "ada", "password": "key-of-ada"}
    with opened(browser, lb, fault=REFUSED, ready=False, http_credentials=login) as page:
        dialog = page.locator("#key-dialog")
        expect(dialog).to_contain_text("needs an API key")
        for key in ("wrong", "key-of-ada"):
            expect(dialog).to_be_visible()
            page.get_by_role("textbox", name="Key").fill(key)
            page.get_by_role("button", name="Use it").click()
        expect(page.locator("#status")).to_have_text("1 of 1 workers up")
        expect(dialog).to_be_hidden()
        assert "key-of" not in page.content()
    assert "key-of" not in lb.log


def test_faults_are_shown(browser: Browser, server: Server, front: Callable[..., Front], tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    file.write_text(f'{{"worker-urls": ["{server.url}"]}}')
    lb = front("--workers-file", str(file))
    with opened(browser, lb, fault=REFUSED, ready=False) as page:
        expect(page.locator("#status")).to_have_text("1 of 1 workers up")
        file.write_text("{}")
        expect(page.locator("#trouble")).to_contain_text("The workers file is not used as it is now: it names no worker")
        expect(page.locator("#status")).to_have_text("1 of 1 workers up")
        lb.terminate()
        until(lambda: lb.process.poll() == 0, "it does not wait for whoever looks")
        expect(page.locator("#trouble")).to_contain_text(re.compile(r"connection.*; trying again in [12] s"))
        expect(page.locator("#status")).to_have_text("no connection")


def test_the_policy_forbids_scripts_in_the_markup(browser: Browser, front: Callable[..., Front], server: Server) -> None:
    with opened(browser, front("--worker-urls", server.url), fault="Content Security Policy", ready=False) as page:
        page.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.evil = 1'; document.body.append(s); }")
        assert page.evaluate("window.evil") is None


def test_a_phone_is_wide_enough_and_nothing_is_asked_out_of_sight(browser: Browser, front: Callable[..., Front], server: Server) -> None:
    lb = front("--worker-urls", server.url)
    with opened(browser, lb, ready=False, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as page:
        expect(page.locator("#status")).to_have_text("1 of 1 workers up")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.evaluate("""() => {
            Object.defineProperty(document, "visibilityState", { value: "hidden" });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
        until(lambda: lb.post("/generate", PROMPT).status == 200, "it answers")
        page.wait_for_timeout(2500)  # what is tested is that nothing happens
        expect(page.locator("#decisions tbody tr")).to_have_count(0)
