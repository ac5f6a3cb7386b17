"""Tools in a chat: what is asked of the model, what its output becomes, plain and streamed alike.

The model's template shows the last message and nothing else, and the engine repeats its prompt: so a message is what the model writes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import write_model

from radixpd.config.settings import GenerationSettings
from radixpd.runtime.messages import Generate
from radixpd.text.tool_calls.formats import FORMATS

CHATS = "/v1/chat/completions"
BARE = "{{ messages[-1].content }}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "now", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
ROME, NOW = ("weather", '{"city": "Röme"}'), ("time", "{}")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röme"}}\n</tool_call>'
BOTH = CALL + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture
def serve(make_api, tmp_path):
    """`serve(**generation)`: a server whose model writes the last message."""

    async def serve(*, template: str = BARE, **generation: Any) -> Any:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return await make_api(directory=write_model(folder, template=template), generation=GenerationSettings(**generation))

    return serve


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS, **more}


def made(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in message.get("tool_calls", []))
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def joined(events: list[Any], index: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """A streamed choice as a message; its finish reasons. Ids and names of calls come once."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    ends = []
    for choice in [choice for event in events if event != "[DONE]" for choice in event["choices"] if choice["index"] == index]:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert "name" not in part["function"]
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, ends


async def both(api: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The plain choice, after the streamed one was found to say the same."""
    (plain,) = (await api.post(CHATS, request))["choices"]
    message, ends = joined(await api.events(CHATS, request))
    assert ends == [plain["finish_reason"]]
    assert message["content"] == (plain["message"]["content"] or "")
    assert message["reasoning_content"] == (plain["message"].get("reasoning_content") or "")
    assert made(message) == made(plain["message"])
    return plain


async def test_tc_01_parallel_calls_have_their_own_indices_and_ids(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    choice = await both(api, body(BOTH))
    assert made(choice["message"]) == [ROME, NOW]
    events = await api.events(CHATS, body(BOTH))
    parts = [part for event in events[:-1] for choice in event["choices"] for part in choice["delta"].get("tool_calls", [])]
    assert {part["index"] for part in parts} == {0, 1}
    assert len({part["id"] for part in parts if "id" in part}) == 2


async def test_tc_02_both_modes_end_alike(serve) -> None:
    api = await serve(tool_call_parser="hermes")
    assert (await both(api, body(CALL)))["finish_reason"] == "tool_calls"
    assert (await both(api, body("no call")))["finish_reason"] == "stop"
    unparsed = await serve()
    listed = '[{"name": "weather", "arguments": {"city": "Röme"}}]'
    assert (await both(unparsed, body(listed, tool_choice="required")))["finish_reason"] == "tool_calls"


async def test_tc_03_a_choice_that_cannot_be_met_is_refused(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    for request in (
        body("a", tool_choice={"type": "function", "function": {"name": "nope"}}),
        {**body("a", tool_choice="required"), "tools": []},
        {**body("a", tool_choice={"type": "function", "function": {"name": "time"}}), "tools": None},
        body("a", tool_choice="sometimes"),
        body("a", tool_choice={"type": "function"}),
    ):
        for mode in ({}, {"stream": True}):
            error = (await api.post(CHATS, {**request, **mode}, status=400))["error"]
            assert error["param"] == "tool_choice"
    assert api.engine.of(Generate) == []


async def test_tc_04_arguments_flow(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    events = await api.events(CHATS, body(CALL))
    parts = [part for event in events[:-1] for choice in event["choices"] for part in choice["delta"].get("tool_calls", [])]
    assert sum(bool(part["function"]["arguments"]) for part in parts) >= len('{"city": "Rome"}')


async def test_tc_05_a_call_that_is_cut_short_is_told_as_far_as_it_came(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    for tokens in range(0, len(CALL.encode()), 7):
        choice = await both(api, body(CALL, max_tokens=tokens))
        assert choice["finish_reason"] == "length"
        for name, arguments in made(choice["message"]):
            assert name == "weather"
            assert ROME[1].startswith(arguments.removesuffix("\ufffd"))


async def test_tc_05_a_stop_string_inside_a_call_cuts_it(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    choice = await both(api, body(CALL, stop="öme"))
    assert made(choice["message"]) == [("weather", '{"city": "R')]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "öme")


async def test_tc_06_whatever_stands_in_earlier_calls_is_shown(serve) -> None:
    template = (
        "{% for call in messages[1].tool_calls %}{{ call.function.arguments | tojson }}|{{ '' + call.function.arguments }}{% endfor %}"
    )
    api = await serve(template=template)
    for arguments in ('{"city": "Ro', "", "[1, 2]", "null", None, {"city": "Rome"}, '"text"', "NaN"):
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = await api.post(CHATS, {"messages": [*talk, {"role": "tool", "tool_call_id": "call_1", "content": "12 C"}]})
        shown = answer["choices"][0]["message"]["content"]
        assert shown.split("|")[1] == (json.dumps(arguments) if isinstance(arguments, dict) else arguments or "{}")
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    for arguments in ('{"a": "\\ud800"}', '{"a": ' * 2000, deep):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        response = await api.http.post(CHATS, json={"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}]})
        assert response.status in (200, 400), await response.text()


async def test_schemas_that_are_too_deep_or_too_long_are_refused(serve) -> None:
    api = await serve()
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(440):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{at}": {"type": "string", "description": "x" * 1000} for at in range(300)}}
    for parameters, status in ((deep, {200, 400}), (wide, {400})):
        for strict in (False, True):
            tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]
            response = await api.http.post(CHATS, json={**body("a", tool_choice="required"), "tools": tools})
            assert response.status in status, await response.text()


async def test_a_template_gets_arguments_as_it_wants_them(serve) -> None:
    """An object for `tojson` and for loops, the very text for sums of texts."""
    template = (
        "{% set f = messages[1].tool_calls[0].function %}{{ f.arguments | tojson }};{{ f.arguments }};{{ 'a' + f.arguments + 'b' }};"
        "{{ f.arguments ~ '' }};{% for key, value in f.arguments.items() %}{{ key }}={{ value }}{% endfor %};"
        "{{ f.arguments is mapping }};{{ messages[2].tool_call_id }};{{ tools is none }}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    talk = [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "12 C"}]
    text = (await (await serve(template=template)).post(CHATS, {"messages": talk}))["choices"][0]["message"]["content"]
    assert text.split(";") == [
        '{"city": "Rome"}', '{"city":"Rome"}', 'a{"city":"Rome"}b', '{"city":"Rome"}', "city=Rome", "True", "call_1", "True",
    ]  # fmt: skip


async def test_the_template_sees_the_tools_unless_none_may_be_called(serve) -> None:
    api = await serve(template="{{ tools | tojson if tools else 'none' }}", tool_call_parser="qwen25")
    for more, shown in (({}, json.dumps(TOOLS)), ({"tool_choice": "none"}, "none"), ({"tools": []}, "none")):
        answer = await api.post(CHATS, body("a", **more))
        assert answer["choices"][0]["message"]["content"] == shown


async def test_without_a_parser_calls_cannot_be_left_to_the_model(serve) -> None:
    api = await serve()
    for more in ({}, {"tool_choice": "auto"}):
        error = (await api.post(CHATS, body("a", **more), status=400))["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_field")
        assert "--tool-call-parser" in error["message"]
    assert (await both(api, body("a", tool_choice="none")))["message"]["content"] == "a"
    named = body('[{"name": "time", "arguments": {}}]', tool_choice={"type": "function", "function": {"name": "time"}})
    assert made((await both(api, named))["message"]) == [NOW]


async def test_what_must_be_called_goes_to_the_engine_as_a_grammar(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}
    seen = {}
    for name, more in {
        "auto": {}, "required": {"tool_choice": "required"}, "strict": {"tools": strict}, "mixed": schema,
        "one": {"tool_choice": "required", "parallel_tool_calls": False},
        "named": {"tool_choice": {"type": "function", "function": {"name": "time"}}},
    }.items():  # fmt: skip
        api.engine.seen.clear()
        await api.post(CHATS, body("a", **more))
        seen[name] = api.engine.of(Generate)[0].params.grammar
    assert seen["auto"] is None
    assert seen["strict"].kind == "tags"
    assert {seen[name].kind for name in ("required", "mixed", "one", "named")} == {"ebnf"}
    assert "weather" in seen["required"].text
    assert "weather" not in seen["named"].text
    assert seen["one"].text != seen["required"].text
    error = (await api.post(CHATS, body("a", tool_choice="required", **schema), status=400))["error"]
    assert "one grammar" in error["message"]


async def test_only_the_first_of_parallel_calls_if_they_are_not_wanted(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    assert made((await both(api, body(BOTH, parallel_tool_calls=False)))["message"]) == [ROME]


async def test_tools_that_cannot_be_read_are_refused_by_place(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    odd = {"type": "object", "properties": {"a": {"contains": {}}}}
    for tools, place in (
        ([{"type": "search"}], "tools[0].type"), ([{"type": "function"}], "tools[0].function"), ([*TOOLS, TOOLS[0]], "tools[2]"),
        ([{"function": {"name": "a b"}}], "tools[0].function.name"), ([{"function": {"name": "a", "parameters": []}}], "[0].function.p"),
        ([TOOLS[0]] * 129, "128"), ([{"function": {"name": "a", "strict": True, "parameters": odd}}], "'contains' at /properties/a"),
        ("x", "tools"),
    ):  # fmt: skip
        error = (await api.post(CHATS, {**body("a"), "tools": tools}, status=400))["error"]
        assert error["param"] == "tools"
        assert place in error["message"]
    lenient = [{"function": {"name": "a", "parameters": odd}}]
    await api.post(CHATS, {**body("a", tool_choice="required"), "tools": lenient})


async def test_a_function_that_is_not_offered_is_not_called(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    text = CALL.replace("weather", "launch")
    choice = await both(api, body(text))
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


async def test_every_sample_calls_for_itself(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    answer = await api.post(CHATS, body(BOTH, n=3))
    events = await api.events(CHATS, body(BOTH, n=3))
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6
    for index, choice in enumerate(answer["choices"]):
        assert made(joined(events, index)[0]) == made(choice["message"]) == [ROME, NOW]


@pytest.mark.parametrize("name", ["llama3", "qwen25", "mistral", "deepseekv3", "deepseekv31"])
async def test_every_format_is_served_around_text(serve, name) -> None:
    wire = FORMATS[name].wire
    text = wire.opening + wire.before + ROME[0] + wire.middle + ROME[1] + wire.after + wire.closing
    choice = await both(await serve(tool_call_parser=name), body(text + "\nDone."))
    assert (made(choice["message"]), choice["message"]["content"]) == ([ROME], "\nDone.")
    assert (len(choice["message"]["tool_calls"][0]["id"]) == 9) == (name == "mistral")


async def test_an_answer_that_only_calls_has_no_content(serve) -> None:
    choice = await both(await serve(tool_call_parser="pythonic"), body('[weather(city="Röme"), time()]'))
    assert choice["message"]["content"] is None
    assert made(choice["message"]) == [ROME, NOW]


async def test_log_probabilities_of_calls_are_all_there(serve) -> None:
    api = await serve(tool_call_parser="qwen25")
    request = body(BOTH, logprobs=True, return_token_ids=True, stream_options=None)
    plain = await api.post(CHATS, request)
    (choice,) = plain["choices"]
    assert len(choice["logprobs"]["content"]) == plain["usage"]["completion_tokens"] == len(choice["token_ids"])
    parts = [choice for event in (await api.events(CHATS, request))[:-1] for choice in event["choices"]]
    assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [id for part in parts for id in part.get("token_ids", [])] == choice["token_ids"]
