"""What the door refuses: every case is a 4xx that names the field, before the engine sees anything, and the server goes on."""

from __future__ import annotations

import asyncio
import json

import pytest

from radixpd.errors import BadRequest
from radixpd.runtime.fields import LATER, Options, Sampling
from radixpd.runtime.messages import Generate
from radixpd.server.native_api import GenerateBody
from radixpd.server.openai_types import HARMLESS, SAMPLING_NAMES, ChatBody, CompletionBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

SAMPLING = [
    ("temperature", -1), ("temperature", 999999), ("temperature", "hot"), ("temperature", True), ("top_p", 0), ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", 1.5), ("min_p", -0.1), ("frequency_penalty", 2.1), ("presence_penalty", -3), ("repetition_penalty", 0),
    ("repetition_penalty", 999), ("max_new_tokens", -5), ("max_new_tokens", 1.5), ("max_new_tokens", 10**12), ("min_new_tokens", -1),
    ("n", 0), ("n", 10**9), ("n", 65), ("seed", 2**64), ("sampling_seed", 10**30), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"260": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "a"}), ("logit_bias", {str(i): 0 for i in range(2000)}),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 10_000), ("stop", "x" * 5000), ("stop", 3), ("stop_token_ids", [-1]),
    ("stop_token_ids", [260]), ("stop_token_ids", [1] * 200), ("stop_token_ids", ["a"]), ("ignore_eos", "yes"), ("json_schema", "{"),
    ("json_schema", {"not": {}}),
    ("json_schema", 5), ("json_schema", ""), ("regex", "a("), ("regex", r"(a)\1"), ("regex", ""), ("regex", {}),
    ("ebnf", ""), ("ebnf", "x" * 70_000), ("structural_tag", "{}"), ("structural_tag", {"structures": [], "triggers": ["<"]}),
    ("custom_params", {"a": 1}),
    ("spaces_between_special_tokens", False), ("stop_regex", "("), ("stop_regex", "a*"), ("stop_regex", r"(a)\1"), ("stop_regex", "b$"),
    ("stop_regex", ["a", "a(?=b)"]), ("stop_regex", ""), ("stop_regex", "a" * 300), ("stop_regex", ["a"] * 17), ("stop_regex", 5),
    ("stop_regex", "(?:a{100}){100}"), ("stop_regex", [f"{i}.{{200}}" for i in range(4)]), ("stream_interval", 0),
    ("stream_interval", 10**7),
]  # fmt: skip
NATIVE = [
    ({"text": "a", "input_ids": [1]}, "text"),
    ({}, "text"),
    ({"text": ""}, "text"),
    ({"text": 5}, "text"),
    ({"text": []}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [260]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [[1], ["a"]]}, "input_ids"),
    ({"input_ids": [10**30]}, "input_ids"),
    ({"text": "a", "top_logprobs_num": 10**9}, "top_logprobs_num"),
    ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "token_ids_logprob": [-1]}, "token_ids_logprob"),
    ({"text": "a", "token_ids_logprob": [10**9], "return_logprob": True}, "token_ids_logprob"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"text": ["a", "b"], "rid": "one"}, "rid"),
    ({"text": ["a", "b"], "rid": ["one", "one"]}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": "a", "priority": 2**40}, "priority"),
    ({"text": "a", "extra_key": "x" * 5000}, "extra_key"),
    ({"text": "a", "cache_salt": 5}, "cache_salt"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"text": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"text": "a", "no_logs": "yes"}, "no_logs"),
    ({"text": "a", "log_metrics": 1}, "log_metrics"),
    ({"text": "a", "return_prompt_token_ids": 1}, "return_prompt_token_ids"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}, "min_new_tokens"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
    ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "bootstrap_room": 1}, "bootstrap_room"),
    ({"text": "a", "bootstrap_room": 0}, "bootstrap_room"),
    ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"text": "a", "json_schema": {}}, "json_schema"),
    ({"text": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "regex"),
]
OPENAI = [
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
    ("/v1/completions", {"prompt": [1, 260]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -5}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "logprobs": 10**6}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "best_of": 0}, "best_of"),
    ("/v1/completions", {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"prompt": "a", "n": "x"}, "n"),
    ("/v1/completions", {"prompt": "a", "n": "x", "best_of": 3}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 0, "best_of": 1}, "n"),
    ("/v1/completions", {"prompt": "a", "n": True, "best_of": 1}, "n"),
    ("/v1/completions", {"prompt": "a", "best_of": 100}, "best_of"),
    ("/v1/completions", {"prompt": ["a", "b"], "rid": "one"}, "rid"),
    ("/v1/completions", {"prompt": ["a", "b"], "rid": ["one"]}, "rid"),
    ("/v1/completions", {"prompt": ["a", "b"], "cache_salt": ["one", 2]}, "cache_salt"),
    ("/v1/completions", {"prompt": "a", "stop_regex": "["}, "stop_regex"),
    ("/v1/completions", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
    ("/v1/completions", {"prompt": "a", "return_token_ids": 1}, "return_token_ids"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/completions", {"prompt": "a", "guided_json": {"type": "object"}}, "guided_json"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": False, "max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "min_tokens": 2**40, "min_new_tokens": 0}, "min_new_tokens"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": ["hi"]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "function", "content": "x"}]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "rid": ["a"]}, "rid"),
    ("/v1/chat/completions", {**CHAT, "stop_regex": ["a?"]}, "stop_regex"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {**CHAT, "response_format": {}}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": "json"}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "json_schema": "{}"}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"contains": {}}}}},
        "response_format",
    ),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "structural_tag"}}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "banana"}}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "functions": [{}]}, "functions"),
    ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}, "modalities"),
    ("/v1/chat/completions", {**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


UNSERVED = [
    ("guided_json", {"type": "object"}), ("structured_outputs", {"regex": "a"}),
    ("functions", [{}]), ("function_call", "f"),
    ("use_beam_search", True), ("allowed_token_ids", [1]), ("bad_words", ["a"]), ("prompt_logprobs", 0), ("prompt_logprobs", 1),
    ("length_penalty", 2), ("logits_processors", ["x"]),
    ("prompt_embeds", "x"), ("chat_template", "x"), ("documents", [{}]), ("suffix", "b"), ("lora_path", "x"), ("bootstrap_room", 0),
    ("modalities", ["audio"]), ("return_hidden_states", True), ("kv_transfer_params", {"a": 1}),
]  # fmt: skip
ONLY_IN_CHATS = [("tools", [{"type": "function"}]), ("tool_choice", "required"), ("tool_choice", {"type": "function"})]
NEUTRAL = {
    "response_format": None, "json_schema": None, "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "use_beam_search": False, "allowed_token_ids": None, "bad_words": [], "prompt_logprobs": None,
    "truncate_prompt_tokens": None, "suffix": "", "modalities": ["text"], "length_penalty": 1, "custom_params": {}, "function_call": "none",
}  # fmt: skip


async def refused(api, path, body, param):
    for mode in ({},) if "stream_options" in body else ({}, {"stream": True}):
        error = (await api.post(path, {**body, **mode}, status=400))["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), (body, error)
        assert param in error["message"], (body, error)
    assert api.engine.of(Generate) == []


async def test_sampling(api) -> None:
    for name, value in SAMPLING:
        await refused(api, "/generate", {"text": "abc", "sampling_params": {name: value}}, name)
    await api.generate("abc")


async def test_native(api) -> None:
    for body, param in NATIVE:
        await refused(api, "/generate", body, param)
    await api.generate("abc")


async def test_openai(api) -> None:
    for path, body, param in OPENAI:
        await refused(api, path, body, param)
    await api.generate("abc")


BODIES = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT}


@pytest.mark.parametrize("path", BODIES)
async def test_features_that_are_not_served(api, path) -> None:
    for name, value in [*UNSERVED, *([] if path == "/v1/chat/completions" else ONLY_IN_CHATS)]:
        error = (await api.post(path, {**BODIES[path], name: value}, status=400))["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_field"), (name, value, error)
        assert name in error["message"]
    assert api.engine.of(Generate) == []
    await api.post(path, {**BODIES[path], **NEUTRAL})


async def test_tool_calls_in_messages_are_named(api) -> None:
    first, call = {"role": "user", "content": "a"}, {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message, place in (
        ({"role": "function", "content": "x"}, "messages[1].role function"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}, "messages[1].tool_calls[0].function.arg"),
        ({"role": "assistant", "tool_calls": [call, {**call, "id": 1}]}, "messages[1].tool_calls[1]"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[1].tool_calls"),
        ({"role": "user", "content": "a", "tool_calls": [call]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": 0}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": False}, "messages[1].tool_call_id"),
        ({"role": "assistant", "function_call": {"name": "x"}}, "messages[1].function_call"),
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            error = (await api.post(path, {"messages": [first, message]}, status=400))["error"]
            assert error["param"] == "messages"
            assert place in error["message"]
    await api.post(
        "/v1/chat/completions", {"messages": [first, {"role": "assistant", "content": "b", "refusal": None, "tool_calls": []}, first]}
    )


def test_no_field_is_both_served_and_refused() -> None:
    bodies = (GenerateBody, CompletionBody, ChatBody, Sampling, Options)
    assert not LATER.keys() & {*SAMPLING_NAMES, *HARMLESS, *(name for body in bodies for name in body.__struct_fields__)}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_over_the_context_has_a_stable_code_and_both_numbers(api, path) -> None:
    body = {
        "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 10**7}},
        "/v1/completions": {"prompt": "abc", "max_tokens": 10**7},
        "/v1/chat/completions": {**CHAT, "max_tokens": 10**7},
    }[path]
    error = (await api.post(path, {**body, "stream": True}, status=400))["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert str(10**7) in error["message"]
    error = (await api.post("/v1/completions", {"prompt": "a" * 600}, status=400))["error"]
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]
    assert error["param"] == "prompt"


async def test_a_request_larger_than_the_pool_is_refused(make_api) -> None:
    api = await make_api(max_total_tokens=64)
    error = (await api.post("/generate", {"text": "a" * 40, "sampling_params": {"max_new_tokens": 40}}, status=400))["error"]
    assert "KV pool" in error["message"]
    await api.generate("a" * 24, sampling={"max_new_tokens": 40})


async def test_harmless_fields_are_ignored_and_unknown_ones_warned_about_once(api, caplog) -> None:
    body = {**CHAT, "user": "u", "metadata": {"a": "b"}, "store": True, "tools": [], "regex": None, "tool_choice": "none"}
    for _ in range(2):
        await api.post("/v1/chat/completions", {**body, "frobnicate_level": 3})
        await api.generate("a", sampling={"frobnicate_level": 3})
    assert [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()] == [
        "unknown request field 'frobnicate_level' is ignored"
    ]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b'"x"', 400), (b"\xff\xfe", 400), (b"NaN", 400), (b'{"text": 1e999}', 400),
        (b"[" * 100_000, 400), (b'{"a":' * 50_000, 400), (b'{"text": "\\ud800"}', 400),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', 400),
    ],
)  # fmt: skip
async def test_a_body_that_is_no_json_object(api, data, status) -> None:
    for path in ("/generate", "/v1/completions", "/tokenize"):
        response = await api.http.post(path, data=data, headers={"Content-Type": "application/json"})
        assert response.status == status
        assert "error" in await response.json()
    await api.generate("a")


async def test_whole_numbers_may_have_a_point(api) -> None:
    """JSON Schema counts 2.0 among the integers, and some languages know only floats."""
    data = b'{"input_ids": [1.0, 2], "sampling_params": {"max_new_tokens": 2.0, "temperature": 0.0, "ignore_eos": true}}'
    response = await api.http.post("/generate", data=data, headers={"content-type": "application/json"})
    assert (await response.json())["output_ids"] == [1, 2]
    data = b'{"text": "a", "sampling_params": {"temperature": 1e400}}'
    huge = await api.http.post("/generate", data=data, headers={"content-type": "application/json"})
    assert (huge.status, (await huge.json())["error"]["param"]) == (400, "temperature")


async def test_two_names_of_one_thing_may_agree(api) -> None:
    answer = await api.post("/v1/completions", {"prompt": "abc", "max_tokens": 2, "max_completion_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2


async def test_content_type_and_size(api, monkeypatch) -> None:
    form = await api.http.post("/generate", data="text=a", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert form.status == 415
    big = await api.http.post("/generate", data=b" " * (33 * 2**20), headers={"Content-Type": "application/json"})
    assert big.status == 413
    assert "error" in await big.json()


async def test_unknown_routes_and_methods(api) -> None:
    missing = await api.http.get("/nothing")
    assert (missing.status, "error" in await missing.json()) == (404, True)
    wrong = await api.http.get("/generate")
    assert (wrong.status, "error" in await wrong.json()) == (405, True)
    assert "POST" in wrong.headers["Allow"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\x80garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 2**20 + b"\r\n\r\n",
    ],
)
async def test_garbage_ends_one_connection_only(api, garbage) -> None:
    server = api.http.server
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(garbage)
    writer.write_eof()
    try:
        answer = await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    writer.close()
    await api.generate("a")


async def test_a_bug_is_500_without_details(api, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise KeyError("secret inner state")

    monkeypatch.setattr(api.service.manager.tokenizer.__class__, "encode", broken)
    response = await api.http.post("/generate", json={"text": "a"})
    assert response.status == 500
    text = await response.text()
    assert "secret" not in text
    assert json.loads(text)["error"]["type"] == "server_error"


async def test_an_error_in_a_stream_is_its_last_event(api, monkeypatch) -> None:
    def broken(*args):
        raise BadRequest("too late")

    monkeypatch.setattr("radixpd.server.openai_api._CompletionFrames.frame", broken)
    events = await api.events("/v1/completions", {"prompt": "a"})
    assert [event["error"]["message"] for event in events] == ["too late"]
