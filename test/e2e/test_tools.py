"""Tools and thoughts on real servers: a tiny random model calls what it must, as the grammar has it, on every way to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from e2e.pd import Front, Pair
from e2e.servers import Server

CHATS = "/v1/chat/completions"
CHAT = [{"role": "user", "content": "what is the weather in Rome"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
POEM = {"type": "object", "properties": {"text": {"type": "string", "minLength": 20, "maxLength": 24}}, "required": ["text"]}
SCHEMAS = {"weather": CITY, "poem": POEM}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "poem"}}
# Two calls, and nothing else: a grammar of the client's own leaves no choice between itself and calls.
CALL = '"<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"days\\": " [1-9] "}}\\n</tool_call>"'
TWO = f'root ::= call "\\n" call\ncall ::= {CALL}'


@pytest.fixture(scope="module")
def hermes(serve: Callable[..., Server]) -> Server:
    """A server whose model writes Hermes' calls and thinks like Qwen."""
    return serve("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="module")
def plain(serve: Callable[..., Server]) -> Server:
    """A server with a parser of calls and none of thoughts."""
    return serve("--tool-call-parser", "qwen25")


def body(**more: Any) -> dict[str, Any]:
    return {"messages": CHAT, "tools": TOOLS, "max_tokens": 200, "temperature": 1.2, "seed": 5, **more}


def answered(server: Any, **more: Any) -> Any:
    """The plain choice; the calls in it follow their schemas."""
    answer = server.post(CHATS, body(**more))
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return choice


def streamed(server: Any, **more: Any) -> tuple[dict[int, dict[str, Any]], list[str], list[dict[str, Any]]]:
    """Calls by index, finish reasons, and the parts of calls."""
    choices = [choice for event in server.stream(CHATS, body(**more)) for choice in event["choices"]]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part["index"], {"name": part["function"].get("name"), "arguments": ""})
        call["arguments"] += part["function"]["arguments"]
    return calls, [choice["finish_reason"] for choice in choices if choice["finish_reason"]], parts


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@pytest.mark.parametrize("which", ["server", "plain"])
def test_tc_02_a_required_call_ends_alike_in_both_modes(which: str, choice: Any, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(which)
    found = answered(server, tool_choice=choice, parallel_tool_calls=False)
    calls, ends, _ = streamed(server, tool_choice=choice, parallel_tool_calls=False)
    assert [found["finish_reason"]] == ends == ["tool_calls"]
    assert calls_of(found) == [(call["name"], call["arguments"]) for call in calls.values()]
    assert choice == "required" or calls_of(found)[0][0] == "poem"
    assert found["message"]["content"] is None


@pytest.mark.parametrize("parser", ["llama3", "mistral", "pythonic", "deepseekv3"])
@pytest.mark.full
def test_every_format_is_written_under_its_grammar(serve: Callable[..., Server], parser: str) -> None:
    server = serve("--tool-call-parser", parser)
    for seed in range(3):
        found = answered(server, tool_choice="required", seed=seed, max_tokens=400)
        if found["finish_reason"] == "tool_calls":
            assert calls_of(found)
            return
    raise AssertionError("no call came to its end")


def test_tc_01_two_calls_of_a_real_model(plain: Server) -> None:
    calls, ends, parts = streamed(plain, ebnf=TWO)
    assert sorted(calls) == [0, 1]
    assert ends == ["tool_calls"]
    assert len({part["id"] for part in parts if "id" in part}) == 2


def test_tc_03_a_missing_tool_is_a_400(server: Server, plain: Server) -> None:
    for each in (server, plain):
        for more in ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, {"tool_choice": "required", "tools": []}):
            answer = each.post(CHATS, body(**more))
            assert (answer.status, answer.json["error"]["param"]) == (400, "tool_choice")


def test_tc_04_a_long_argument_comes_in_pieces(server: Server) -> None:
    _, _, parts = streamed(server, tool_choice=NAMED)
    assert sum(bool(part["function"]["arguments"]) for part in parts) >= 3


def test_tc_05_a_required_call_cut_by_its_limit(server: Server, plain: Server) -> None:
    for each in (server, plain):
        for tokens in (1, 5, 40, 60):
            found = answered(each, tool_choice=NAMED, max_tokens=tokens)
            calls, ends, _ = streamed(each, tool_choice=NAMED, max_tokens=tokens)
            assert [found["finish_reason"]] == ends == ["length"]
            assert calls_of(found) == [(call["name"], call["arguments"]) for call in calls.values()]
        assert calls_of(found)[0][1].startswith('{"text": "')


def test_tc_06_broken_json_in_the_history_is_text(plain: Server) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ro'}}
    history = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": "12"}]
    assert plain.post(CHATS, body(messages=history, max_tokens=4)).status == 200
    assert plain.generate(text="alive", sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1


def test_lp_04_thoughts_of_a_real_model_have_log_probabilities(hermes: Server) -> None:
    ebnf = 'root ::= "<think>" [a-z]{5,9} "</think>" [0-9]{3,4}'
    wish = {"ebnf": ebnf, "tools": None, "logprobs": True, "chat_template_kwargs": {"enable_thinking": True}}
    events = list(hermes.stream(CHATS, {"messages": CHAT, "max_tokens": 64, "seed": 2, **wish, "stream_options": {"include_usage": True}}))
    choices = [choice for event in events for choice in event["choices"]]
    entries = sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"])
    assert entries == events[-1]["usage"]["completion_tokens"]
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_document_stands_behind_the_thought(hermes: Server) -> None:
    bias = {str(hermes.post("/tokenize", {"text": char, "add_special_tokens": False}).json["tokens"][0]): 4 for char in "</think>"}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    for seed in range(4):
        answer = hermes.post(CHATS, body(tools=None, response_format=shape, seed=seed, logit_bias=bias, max_tokens=600)).json
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    talk = [*CHAT, {"role": "assistant", "content": "<think></think>"}]
    off = hermes.post(CHATS, body(tools=None, response_format=shape, messages=talk, continue_final_message=True))
    jsonschema.validate(json.loads(off.json["choices"][0]["message"]["content"]), CITY)


def test_samples_call_for_themselves(server: Server) -> None:
    answer = server.post(CHATS, body(tool_choice="required", n=3, parallel_tool_calls=False)).json
    found = [calls_of(choice) for choice in answer["choices"]]
    assert [len(calls) for calls in found] == [1, 1, 1]
    assert len({call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}) == 3
    calls, _, _ = streamed(server, tool_choice="required", parallel_tool_calls=False)
    assert calls_of(answered(server, tool_choice="required", parallel_tool_calls=False)) == [(calls[0]["name"], calls[0]["arguments"])]


def test_calls_are_the_same_over_a_pair_and_through_the_load_balancer(server: Server, pair: Callable[..., Pair]) -> None:
    both = pair()
    wish = {"tool_choice": "required", "parallel_tool_calls": False}
    alone = calls_of(answered(server, **wish))
    assert calls_of(answered(both, **wish)) == alone
    front = Front.mini_lb(both)
    try:
        assert calls_of(answered(front, **wish)) == alone
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(model="tiny", **body(**wish), stream=True)
            parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or []]
        assert [("".join(part.function.name or "" for part in parts), "".join(part.function.arguments for part in parts))] == alone
    finally:
        assert front.close() == 0
