"""Thoughts in a chat: told apart, streamed, counted, and before a grammar or a call. The model writes the last message (test_tools_api)."""

from __future__ import annotations

from typing import Any

import pytest
from contract import Contract
from server.test_tools_api import BARE, CALL, CHATS, ROME, TOOLS, both, joined, made, serve

from radixpd.grammar.thinking import THOUGHT
from radixpd.runtime.messages import Generate
from radixpd.server import openapi

__all__ = ["serve"]  # the fixture

THOUGHT_TEXT = "<think>\nIs it 4? Ja, größer.\n</think>\n\nFour."
MARKED = "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def test_a_thought_has_a_field_of_its_own(serve) -> None:
    api = await serve(reasoning_parser="qwen3")
    choice = await both(api, body(THOUGHT_TEXT))
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Is it 4? Ja, größer.", "Four.")
    choice = await both(api, body("No thought."))
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (None, "No thought.")


async def test_some_models_think_from_the_first_character_on(serve) -> None:
    api = await serve(reasoning_parser="deepseek-r1")
    for text in ("Hm.\n</think>\nFour.", "<think>Hm.</think>Four."):
        choice = await both(api, body(text))
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Four.")
    cut = await both(api, body("still thinking"))
    assert (cut["message"]["reasoning_content"], cut["message"]["content"]) == ("still thinking", "")


async def test_the_prompt_may_switch_thinking_off(serve) -> None:
    api = await serve(reasoning_parser="qwen3", template=MARKED)
    choice = await both(api, body("<think>x</think>y", chat_template_kwargs={"enable_thinking": False}))
    assert choice["message"]["content"].startswith("<think>x</think>y")
    assert (await both(api, body("<think>x</think>y", chat_template_kwargs={"enable_thinking": True})))["message"]["content"] == "y"


async def test_a_client_may_want_it_unseparated_or_in_one_piece(serve) -> None:
    api = await serve(reasoning_parser="qwen3", tool_call_parser="qwen25")
    choice = await both(api, body(THOUGHT_TEXT, separate_reasoning=False))
    assert choice["message"] == {"role": "assistant", "content": THOUGHT_TEXT.replace("\n\n", ""), "refusal": None}
    choice = await both(api, body(f"<think>{CALL}</think>{CALL}", separate_reasoning=False, tools=TOOLS))
    assert (choice["message"]["content"], made(choice["message"])) == (f"<think>{CALL}</think>", [ROME])
    for flowing, pieces in ((True, 10), (False, 1)):
        events = await api.events(CHATS, body(THOUGHT_TEXT, stream_reasoning=flowing))
        assert joined(events)[0]["reasoning_content"] == "Is it 4? Ja, größer."
        told = [choice for event in events[:-1] for choice in event["choices"] if choice["delta"].get("reasoning_content")]
        assert len(told) == 1 if pieces == 1 else len(told) > pieces


async def test_a_call_stands_behind_the_thought(serve) -> None:
    api = await serve(reasoning_parser="qwen3", tool_call_parser="qwen25")
    choice = await both(api, body(f"<think>{CALL}</think>{CALL}", tools=TOOLS))
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (CALL, None)
    assert (made(choice["message"]), choice["finish_reason"]) == ([ROME], "tool_calls")


@pytest.mark.parametrize("interval", [1, 5])
async def test_lp_04_every_token_has_its_log_probability_whichever_field_it_goes_to(serve, interval) -> None:
    api = await serve(reasoning_parser="qwen3", tool_call_parser="qwen25")
    request = body(THOUGHT_TEXT + CALL, tools=TOOLS, logprobs=True, top_logprobs=1, stream_interval=interval)
    plain = await api.post(CHATS, request)
    wanted = plain["choices"][0]["logprobs"]["content"]
    assert len(wanted) == plain["usage"]["completion_tokens"]
    events = (await api.events(CHATS, {**request, "stream_options": {"include_usage": True}}))[:-1]
    parts = [choice for event in events for choice in event["choices"]]
    assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]] == wanted
    assert events[-1]["usage"]["completion_tokens"] == len(wanted)
    thinking = [part for part in parts if part["delta"].get("reasoning_content")]
    assert len(thinking) > 3
    assert all(part["logprobs"] for part in thinking)


async def test_usage_counts_the_tokens_of_thoughts(serve) -> None:
    api = await serve(reasoning_parser="qwen3")
    thought = len(THOUGHT_TEXT.partition("</think>")[0].encode()) + len("</think>")
    for text, count in ((THOUGHT_TEXT, thought), ("Four.", 0), ("<think>ab", len("<think>ab") + 1)):
        usage = (await api.post(CHATS, body(text, n=2)))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
        events = await api.events(CHATS, body(text, n=2, stream_options={"include_usage": True, "continuous_usage_stats": True}))
        assert events[-2]["usage"] == usage
    assert "completion_tokens_details" not in (await api.post("/v1/completions", {"prompt": "a"}))["usage"]


async def test_a_grammar_begins_behind_the_thought(serve) -> None:
    api = await serve(reasoning_parser="qwen3", template=MARKED)
    free = await serve(template=MARKED)
    for more, thinks in (({}, True), ({"chat_template_kwargs": {"enable_thinking": False}}, False)):
        api.engine.seen.clear()
        await api.post(CHATS, body("a", regex="[0-9]", **more))
        assert (THOUGHT in api.engine.of(Generate)[0].params.grammar.text) == thinks
    await free.post(CHATS, body("a", regex="[0-9]"))
    await api.post("/generate", {"text": "a", "sampling_params": {"regex": "[0-9]"}})
    for engine in (free.engine, api.engine):
        assert THOUGHT not in engine.of(Generate)[-1].params.grammar.text


async def test_other_routes_know_no_thoughts(serve) -> None:
    api = await serve(reasoning_parser="deepseek-r1", template=BARE)
    assert (await api.generate("a</think>b"))["text"] == "a</think>b"
    assert (await api.post("/v1/completions", {"prompt": "a</think>b"}))["choices"][0]["text"] == "a</think>b"


async def test_answers_are_as_described(serve) -> None:
    api = await serve(reasoning_parser="qwen3", tool_call_parser="qwen25")
    contract = Contract(api.http.server.app[openapi.DOCUMENT])
    for text in (f"<think>a</think>b {CALL}", "plain", f"<think>a</think>{CALL}"):
        for mode in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            request = body(text, tools=TOOLS, logprobs=True, tool_choice="auto", parallel_tool_calls=True, separate_reasoning=True, **mode)
            assert contract.allows(contract.body_schema("post", CHATS), request)
            response = await api.http.post(CHATS, json=request)
            contract.check("post", CHATS, response.status, response.content_type, await response.read())
