"""OpenAI routes: shapes, streams, echo and log-probabilities, usage, samples; and the official client against them."""

from __future__ import annotations

import asyncio

import openai
import pytest
from fake_engine import EOS, logprob_of, write_model
from server.events import parse_events

from radixpd.runtime.messages import Generate


async def chat(api, content="hi", **fields):
    return await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})


async def test_a_completion(api) -> None:
    api.engine.cached = 2
    answer = await api.post("/v1/completions", {"model": "org/fake", "prompt": "hello", "max_tokens": 9})
    assert answer["object"] == "text_completion"
    assert answer["model"] == "org/fake"
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "matched_stop": EOS}]
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


async def test_usage_never_reports_more_cached_than_prompt(api) -> None:
    api.engine.cached = 99
    answer = await api.post("/v1/completions", {"prompt": ["ab", "cde"], "n": 2})
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 2 * 3 + 2 * 4
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "ab"), (1, "ab"), (2, "cde"), (3, "cde")]


async def test_defaults_of_the_output_limit(make_api) -> None:
    api = await make_api(context_length=100)
    answer = await api.post("/v1/completions", {"prompt": "abc", "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = await chat(api, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 100


async def test_a_minimum_raises_the_default_limit(api) -> None:
    answer = await api.post("/v1/completions", {"prompt": "abc", "min_tokens": 40, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 40
    answer = await api.generate("abc", sampling={"min_new_tokens": 200, "ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == 200
    answer = await api.generate("abc", sampling={"min_new_tokens": 5000, "ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == 512 - 3


async def test_prompts_as_ids(api) -> None:
    ids = api.service.manager.tokenizer.encode("abc").tolist()
    assert (await api.post("/v1/completions", {"prompt": ids}))["choices"][0]["text"] == "abc"
    answer = await api.post("/v1/completions", {"prompt": [ids, ids[:1]], "echo": True})
    assert [choice["text"] for choice in answer["choices"]] == ["abcabc", "aa"]


async def test_echo_of_ids_that_the_tokenizer_lacks(api) -> None:
    """The model's table has more rows than the tokenizer has tokens."""
    answer = await api.post("/v1/completions", {"prompt": [66, 259], "echo": True, "logprobs": 0, "max_tokens": 0})
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["tokens"][1]) == ("c", "")


async def test_echo_with_scores(api) -> None:
    ids = api.service.manager.tokenizer.encode("abc").tolist()
    answer = await api.post("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, pytest.approx(logprob_of(ids[1])), pytest.approx(logprob_of(ids[2]))]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] is None
    assert all("!" in top for top in logprobs["top_logprobs"][1:])  # token 0 is what the fake engine likes best
    assert answer["usage"]["completion_tokens"] == 0


async def test_zero_logprobs_means_the_token_alone(api) -> None:
    logprobs = (await api.post("/v1/completions", {"prompt": "ab", "logprobs": 0}))["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 3
    assert logprobs["top_logprobs"] is None


async def test_best_of_returns_the_likeliest(api) -> None:
    answer = await api.post("/v1/completions", {"prompt": "ab", "n": 1, "best_of": 3})
    assert len(answer["choices"]) == 1
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 9
    assert len(api.engine.of(Generate)[0].rids) == 3


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"stop": "ST", "n": 2}, {"echo": True}])
async def test_a_streamed_completion_adds_up_to_the_plain_one(api, fields) -> None:
    body = {"prompt": ["größe STx", "b"], "max_tokens": 30, **fields}
    plain = await api.post("/v1/completions", body)
    events = await api.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == plain["usage"]
    assert all(event["usage"] is None for event in events[:-2])
    for wanted in plain["choices"]:
        parts = [choice for event in events[:-2] for choice in event["choices"] if choice["index"] == wanted["index"]]
        assert "".join(part["text"] for part in parts) == wanted["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [wanted["finish_reason"]]
        if wanted["logprobs"]:
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [value for part in parts for value in part["logprobs"][name]] == wanted["logprobs"][name]


async def test_running_usage(api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await api.events("/v1/completions", {"prompt": "abcdef", "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 7


async def test_a_chat_answer(api) -> None:
    answer = await chat(api, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], logprobs=True, top_logprobs=2)
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "<user>a b\n<assistant>"
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert content[0]["token"] == "<"
    assert content[0]["bytes"] == [ord("<")]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_streamed_chat_says_the_role_first(api, samples) -> None:
    fields = {"n": samples, "logprobs": True, "stop": ["ant>"]}
    plain = await chat(api, **fields)
    events = await api.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert events[-1] == "[DONE]"
    assert events[0]["object"] == "chat.completion.chunk"
    for wanted in plain["choices"]:
        parts = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == wanted["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == wanted["message"]["content"] == "<user>hi\n<assist"
        assert [part["finish_reason"] for part in parts][-2:] == [None, "stop"]
        assert parts[-1]["matched_stop"] == "ant>"
        assert [e for part in parts for e in (part["logprobs"] or {"content": []})["content"]] == wanted["logprobs"]["content"]


@pytest.mark.parametrize("text", ["OK! ", "OK!\n", "OK"])
async def test_a_message_is_continued_from_its_exact_end(api, text) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    for _ in range(2):
        answer = await api.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
        assert answer["choices"][0]["message"]["content"] == f"<user>q\n<assistant>{text}"
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    await api.post("/v1/chat/completions", both, status=400)
    await api.post("/v1/chat/completions", {"messages": messages[:1], "continue_final_message": True}, status=400)
    await api.post("/v1/chat/completions", {"messages": messages})  # a new assistant turn


async def test_what_the_template_refuses_is_400_in_its_own_words(api) -> None:
    body = {"messages": [{"role": "system", "content": "x"}]}
    error = (await api.post("/v1/chat/completions", body, status=400))["error"]
    assert "no system role here" in error["message"]
    assert "no system role here" in (await api.post("/v1/chat/completions", {**body, "stream": True}, status=400))["error"]["message"]


async def test_a_model_without_template_still_completes(make_api, tmp_path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    api = await make_api(directory=write_model(folder, template=None))
    error = (await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, status=400))["error"]
    assert "--chat-template" in error["message"]
    await api.post("/v1/completions", {"prompt": "x"})


async def test_models(api) -> None:
    models = await (await api.http.get("/v1/models")).json()
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("org/fake", 512)]
    assert (await (await api.http.get("/v1/models/org/fake")).json())["id"] == "org/fake"
    missing = await api.http.get("/v1/models/other")
    assert missing.status == 404
    assert (await missing.json())["error"]["code"] == "model_not_found"


async def test_an_abort_in_mid_stream_is_one_error_event(api) -> None:
    api.engine.hold()
    body = {"prompt": "abc", "rid": "r", "stream": True, "ignore_eos": True, "max_tokens": 100}
    task = asyncio.create_task(api.http.post("/v1/completions", json=body))
    await api.engine.received(Generate)
    api.engine.step()
    response = await task
    await api.post("/abort_request", {"rid": "r"})
    *content, last = parse_events(await response.text())
    assert [event["choices"][0]["text"] for event in content] == ["a"]
    assert "aborted" in last["error"]["message"]


async def test_the_official_client(api) -> None:
    client = openai.AsyncOpenAI(base_url=str(api.http.make_url("/v1")), api_key="x", max_retries=0)
    answer = await client.chat.completions.create(
        model="org/fake", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1, max_completion_tokens=200
    )
    assert answer.choices[0].message.content == "<user>hi\n<assistant>"
    assert answer.choices[0].logprobs.content[0].token == "<"
    stream = await client.chat.completions.create(
        model="org/fake", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "<user>hi\n<assistant>"
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    done = await client.completions.create(model="org/fake", prompt="abc", echo=True, logprobs=1)
    assert done.choices[0].text == "abcabc"
    assert (await client.models.list()).data[0].id == "org/fake"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="org/fake", prompt="abc", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nothing")
    await client.close()
