"""The web page in headless Chromium against a real server: a real click, a real stream, prompts coloured by the cache, the tree live.

Every page is watched: an error in its console, an exception, or a request to any other host fails the test. Requests of the page are its
own; where a test needs an answer of a certain length, what the model may write is fixed on the way to the server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.servers import ASCII_BIAS, Server, tiny_chat_model, until
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
PATIENCE = 20_000  # milliseconds
REFUSED = "Failed to load resource"
SYSTEM = "Answer as short as you can, and do not forget what was said before."
# Notes the length of the newest answer whenever it changes.
WATCH_GROWTH = """() => {
    window.lengths = [];
    new MutationObserver(() => {
        const shown = document.querySelectorAll(".said.model .text");
        if (shown.length) window.lengths.push(shown[shown.length - 1].textContent.length);
    }).observe(document.getElementById("log"), { childList: true, subtree: true, characterData: true });
}"""

expect.set_options(timeout=PATIENCE)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the web page is not tested")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
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


def rendered(*messages: tuple[str, str]) -> str:
    """The prompt as the tiny model's template makes it."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def answer(page: Page) -> str:
    return str(page.locator(".said.model .text").last.text_content())


def test_an_answer_streams_and_the_next_prompt_shows_what_was_cached(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page)
        page.evaluate(WATCH_GROWTH)
        say(page, "Who are you?")
        lengths = page.evaluate("window.lengths")
        assert lengths == sorted(lengths)
        assert len(set(lengths) - {0}) >= 5, lengths
        first = facts(page)
        assert first["finish"] == "length"
        assert first["answer tokens"] == "24"
        assert float(first["TTFT"].removesuffix(" s")) >= 0
        assert float(first["tokens/s"]) > 0
        said = answer(page)
        say(page, "And who am I?")
        page.locator(".turn").last.locator(".prompt summary").click()
        cached, computed = prompt_text(page)
        whole = rendered(("system", SYSTEM), ("user", "Who are you?"), ("assistant", said), ("user", "And who am I?"))
        assert cached + computed == whole
        assert len(cached) > len(rendered(("system", SYSTEM), ("user", "Who are you?")))
        assert computed.endswith("And who am I?<|im_end|>\n<|im_start|>assistant\n")
        tokens = server.post("/tokenize", {"text": cached, "add_special_tokens": False}).json["count"]
        assert tokens % 16 == 0
        assert facts(page)["cached"].split(" ")[0] == str(tokens)
        shown = [page.locator(".prompt pre").last.locator(f".{kind}") for kind in ("cached", "computed")]
        colours = {each.evaluate("e => getComputedStyle(e).backgroundColor") for each in shown}
        assert len(colours) == 2


def test_the_tree_and_the_pool_are_shown_live(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page)
        say(page, "Grow a branch.")
        expect(page.locator("#tree .bar.mine")).not_to_have_count(0)
        bar = page.locator("#tree .bar.mine").first
        expect(bar).to_contain_text("system ↵ Answer as short")
        pages = server.settled()
        for owner in ("tree", "request", "free"):
            expect(page.locator(f"[data-owner={owner}] b")).to_have_text(f"{int(pages[owner]):,}")
        bar.hover()
        expect(page.locator("#node")).to_contain_text("tokens")
        drawn = page.locator("#pool").evaluate(
            "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.reduce((seen, value, at, all) => "
            "at % 4 ? seen : [...seen, all.slice(at, at + 4).join()], [])).size"
        )
        assert drawn >= 3  # the tree's colour, the free pages' and the gaps'
        # Somebody else's branch appears without a click.
        server.generate(text="Nobody has asked this before, " * 4, sampling_params={"max_new_tokens": 1})
        expect(page.locator("#tree")).to_contain_text("Nobody has asked this")


def test_the_tree_is_walked_with_keys(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        for word in ("one", "two"):
            server.generate(text="The same beginning, " * 4 + word * 8, sampling_params={"max_new_tokens": 1})
        stem = page.get_by_role("treeitem").filter(has_text="The same beginning").first
        expect(stem).to_be_visible()
        until(lambda: page.locator('#tree [aria-level="2"]').count() >= 2, "the stem has its branches")
        stem.focus()
        for key, level in (("ArrowRight", "2"), ("ArrowDown", "2"), ("ArrowLeft", "1")):
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.getAttribute('aria-level')") == level
        assert page.evaluate("document.activeElement.textContent").startswith("The same beginning")
        expect(page.locator("#node")).to_contain_text("2 below it")


def test_stop_aborts_and_what_came_stays(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page, tokens=3000)
        page.get_by_label("Message").fill("Never end.")
        page.keyboard.press("Enter")
        until(lambda: len(answer(page)) > 20, "the answer has begun")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".facts [data-fact=finish]")).to_contain_text("stopped by you")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        server.settled()
        assert server.metric("num_running_reqs") == 0
        kept = answer(page)
        assert 20 < len(kept) < 3000
        page.get_by_label("Max tokens").fill("8")
        say(page, "Go on.")
        page.locator(".turn").last.locator(".prompt summary").click()
        assert kept in "".join(prompt_text(page))


def test_new_chat_ends_the_old_one(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page, tokens=3000)
        page.get_by_label("Message").fill("Never end.")
        page.keyboard.press("Enter")
        until(lambda: len(answer(page)) > 20, "the answer has begun")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()
        server.settled()
        page.get_by_label("Max tokens").fill("8")
        say(page, "Hello again.")
        page.locator(".prompt summary").click()
        assert "".join(prompt_text(page)) == rendered(("system", SYSTEM), ("user", "Hello again."))


def test_errors_come_in_the_servers_words_and_are_not_sent_again(browser: Browser, server: Server) -> None:
    with opened(browser, server, fault=REFUSED) as page:
        settle(page, tokens=99_999)
        page.get_by_label("Message").fill("Too much.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".error")).to_contain_text("tokens, but the request needs")
        expect(page.get_by_label("Message")).to_have_value("Too much.")
        page.get_by_label("Max tokens").fill("8")
        say(page, "Now it fits.")
        page.locator(".prompt summary").click()
        assert "".join(prompt_text(page)) == rendered(("system", SYSTEM), ("user", "Now it fits."))


def test_an_error_in_mid_stream_is_shown(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page, tokens=3000)
        force(page, ignore_eos=True, logit_bias=ASCII_BIAS, rid="page-job")
        page.get_by_label("Message").fill("Never end.")
        page.keyboard.press("Enter")
        until(lambda: len(answer(page)) > 20, "the answer has begun")
        server.post("/abort_request", {"rid": "page-job"})
        expect(page.locator(".error")).to_contain_text("aborted")
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_markup_in_messages_is_text(browser: Browser, server: Server) -> None:
    evil = '<img src=x onerror="window.evil=1"><script>window.evil=1</script><b>bold</b>'
    with opened(browser, server) as page:
        settle(page, system=evil)
        say(page, evil)
        page.locator(".prompt summary").click()
        assert evil in "".join(prompt_text(page))
        expect(page.locator("#tree")).to_contain_text("<img")
        # No model says this when asked to, so the answer is made up here.
        event = {"choices": [{"delta": {"content": evil}, "finish_reason": evil}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        say(page, "Say it.")
        assert answer(page) == facts(page)["finish"] == evil
        assert page.locator("main img, main script, .text *, pre b, #tree b").count() == 0
        assert page.evaluate("window.evil") is None


def test_the_policy_forbids_scripts_in_the_markup(browser: Browser, server: Server) -> None:
    with opened(browser, server, fault="Content Security Policy") as page:
        page.evaluate("window.addEventListener('securitypolicyviolation', (event) => { window.refused = event.effectiveDirective; })")
        page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.evil = 1";
            document.body.append(script);
        }""")
        assert page.evaluate("window.evil") is None
        assert page.evaluate("window.refused").startswith("script-src")


def test_without_a_report_of_cached_tokens_the_page_says_so(browser: Browser, serve: Callable[..., Server]) -> None:
    with opened(browser, serve("--no-enable-cache-report")) as page:
        settle(page)
        say(page, "Anything?")
        assert facts(page)["cached"] == "not reported"
        page.locator(".prompt summary").click()
        expect(page.locator(".prompt")).to_contain_text("does not report cached tokens")
        assert page.locator(".prompt pre").inner_text() == rendered(("system", SYSTEM), ("user", "Anything?"))


def test_a_model_without_template_goes_on_with_the_text(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = Server(tiny_chat_model(tmp_path_factory.mktemp("plain"), template=False), "--max-total-tokens", "4096")
    try:
        with opened(browser, server) as page:
            expect(page.locator("#no-template")).to_be_visible()
            settle(page)
            expect(page.locator("#system")).to_be_hidden()
            say(page, "Once upon a time there was a tree with many roots. ")
            said = answer(page)
            say(page, "And then?")
            page.locator(".prompt summary").last.click()
            cached, computed = prompt_text(page)
            assert cached + computed == f"Once upon a time there was a tree with many roots. {said}And then?"
            assert len(cached) >= 48
    finally:
        assert server.close() == 0


def test_a_phone_shows_one_half_at_a_time_and_asks_only_for_what_it_shows(browser: Browser, server: Server) -> None:
    with opened(browser, server, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "cache_tree" in request.url else None)
        settle(page)
        say(page, "How wide is a phone? " * 5)
        page.locator(".prompt summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.locator("#log").evaluate("e => e.scrollWidth - e.clientWidth") == 0
        assert asked == []
        page.get_by_role("button", name="Cache").click()
        expect(page.locator("#chat")).to_be_hidden()
        expect(page.get_by_role("treeitem").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_cache_that_cannot_be_seen_is_asked_ever_less_often(browser: Browser, server: Server) -> None:
    with opened(browser, server, fault=REFUSED) as page:
        expect(page.get_by_label("Pages by owner")).to_contain_text("free")
        page.route("**/cache_tree", lambda route: route.fulfill(status=503, json={"error": {"message": "not just now"}}))
        expect(page.locator("#trouble")).to_contain_text("not just now. Trying again in 2 s.")
        expect(page.locator("#trouble")).to_contain_text("not just now. Trying again in 4 s.")
        page.unroute("**/cache_tree")
        expect(page.locator("#trouble")).to_be_hidden()
