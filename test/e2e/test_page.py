"""The web page in headless Chromium against a real server: a real click, a real stream, prompts coloured by the cache, the tree live."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from e2e.browsing import CHROMIUM, NO_BROWSER, SYSTEM, answer, chromium, facts, force, opened, prompt_text, say, settle
from e2e.servers import ASCII_BIAS, Server, tiny_chat_model, until
from playwright.sync_api import Browser, Error, Page, expect

REFUSED = "Failed to load resource"  # how the browser's console tells an answer that is not 2xx
# Notes the length of the newest answer whenever it changes.
WATCH_GROWTH = """() => {
    window.lengths = [];
    new MutationObserver(() => {
        const shown = document.querySelectorAll(".said.model .text");
        if (shown.length) window.lengths.push(shown[shown.length - 1].textContent.length);
    }).observe(document.getElementById("log"), { childList: true, subtree: true, characterData: true });
}"""
# How many colours a canvas has.
COLOURS = """(canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def rendered(*messages: tuple[str, str]) -> str:
    """The prompt as the tiny model's template makes it."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def test_an_answer_streams_and_the_next_prompt_shows_what_was_cached(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page, tokens=160)
        page.evaluate(WATCH_GROWTH)
        say(page, "Who are you?")
        lengths = page.evaluate("window.lengths")
        assert lengths == sorted(lengths)
        assert len(set(lengths) - {0}) >= 3, lengths
        first = facts(page)
        assert first["finish"] == "length"
        assert first["answer tokens"] == "160"
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
        drawn = page.locator("#pool").evaluate(COLOURS)
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


def test_a_word_without_end_does_not_widen_the_page(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        settle(page, system="S" * 3000)
        page.get_by_label("Message").fill("M" * 3000)
        assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_the_details_of_a_node_go_with_it(browser: Browser, server: Server) -> None:
    with opened(browser, server) as page:
        server.settled()
        server.generate(text="Here today, gone tomorrow. " * 3, sampling_params={"max_new_tokens": 1})
        page.get_by_role("treeitem").filter(has_text="Here today").hover()
        expect(page.locator("#node")).to_contain_text("Here today")
        page.mouse.move(5, 5)
        assert server.post("/flush_cache").status == 200
        expect(page.locator("#node")).not_to_contain_text("Here today")


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


def give_key(page: Page, key: str) -> None:
    """Answer the page's question."""
    page.get_by_role("textbox", name="Key").fill(key)
    page.get_by_role("button", name="Use it").click()


def test_with_keys_the_page_asks_for_one(browser: Browser, serve: Callable[..., Server]) -> None:
    server = serve("--api-key", "key-of-ada", "--api-key", "key-of-bob", "--admin-api-key", "key-of-root")
    with browser.new_context() as stranger, pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
        stranger.new_page().goto(server.url + "/")
    login = {"username": "ada", "password": "key-of-ada"}
    with opened(browser, server, fault=REFUSED, ready=False, http_credentials=login) as page:
        expect(page.locator("#key-dialog")).to_contain_text("needs an API key: Authorization")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_label("Message").fill("Do I need a key?")
        page.keyboard.press("Enter")
        give_key(page, "wrong")
        expect(page.locator("#key-dialog")).to_be_visible()
        give_key(page, "key-of-ada")
        expect(page.locator("#model")).not_to_be_empty()
        settle(page)
        say(page, "Do you know me?")
        assert facts(page)["finish"] == "length"
        # The cache is the administrator's.
        expect(page.locator("#trouble")).to_contain_text("admin key")
        expect(page.get_by_role("treeitem")).to_have_count(0)
        page.get_by_role("button", name="Give an admin key").click()
        give_key(page, "key-of-root")
        expect(page.locator("#tree .bar.mine").first).to_be_visible()
        expect(page.locator("#trouble")).to_be_hidden()
        page.reload()
        expect(page.locator("#model")).not_to_be_empty()
        assert "key-of" not in page.content()
    assert "key-of" not in server.log


def test_where_several_keys_share_a_server_the_tree_has_no_texts(browser: Browser, serve: Callable[..., Server]) -> None:
    server = serve("--api-key", "key-of-ada", "--api-key", "key-of-bob")
    bob = {"Authorization": "Bearer key-of-bob"}
    server.post("/generate", {"text": "Bob has a secret. " * 4, "sampling_params": {"max_new_tokens": 1}}, headers=bob)
    with opened(browser, server, fault=REFUSED, ready=False, http_credentials={"username": "", "password": "key-of-ada"}) as page:
        give_key(page, "key-of-ada")
        bar = page.get_by_role("treeitem").first
        expect(bar).to_have_text("64 tokens")
        bar.hover()
        expect(page.locator("#node")).to_contain_text("Texts are left out")
        assert "secret" not in page.content()


def test_a_server_that_goes_away_is_noticed_and_welcomed_back(browser: Browser, server: Server) -> None:
    with opened(browser, server, fault=REFUSED) as page:
        settle(page)
        expect(page.locator("#status")).to_have_text("ready")
        page.unroute("**/v1/chat/completions")
        page.route("**/*", lambda route: route.abort("connectionrefused"))
        page.get_by_label("Message").fill("Are you there?")
        page.keyboard.press("Enter")
        expect(page.locator(".error")).to_have_text("there is no connection to the server")
        expect(page.locator("#trouble")).to_contain_text("no connection")
        expect(page.locator("#status")).to_have_text("no connection")
        page.unroute("**/*")
        expect(page.locator("#status")).to_have_text("ready")
        page.keyboard.press("Enter")
        expect(page.locator(".turn").last.locator(".prompt")).to_be_attached()
        page.locator(".prompt summary").click()
        assert "".join(prompt_text(page)) == rendered(("system", SYSTEM), ("user", "Are you there?"))
