"""Fields of requests that act on every route: patterns, intervals, cut prompts, ids in answers, names for many prompts, defaults."""

from __future__ import annotations

import asyncio
import itertools
import json

import numpy as np
import pytest
from fake_engine import EOS, make_resolved, write_model

from radixpd.config.settings import GenerationSettings
from radixpd.errors import ConfigError
from radixpd.runtime.defaults import Defaults, defaults_of
from radixpd.runtime.messages import Generate, Stop

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
BARE = dict(zip(ROUTES, ({"text": "ab"}, {"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]})))


def body_of(route, text, **sampling):
    """A request whose answer repeats `text` (within the template's frame on the chat route)."""
    if route == "/generate":
        return {"text": text, "sampling_params": {"max_new_tokens": 100, **sampling}}
    prompt = {"prompt": text} if route == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "max_tokens": 100, **sampling}


def text_of(route, answer):
    if route == "/generate":
        return answer["text"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def ending_of(route, answer):
    if route == "/generate":
        return answer["meta_info"]["finish_reason"]["matched"]
    return answer["choices"][0]["matched_stop"]


def streamed(route, events):
    """The text that a stream adds up to."""
    if route == "/generate":
        return events[-2]["text"]
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_pattern_ends_the_output_like_a_stop_string(api, route) -> None:
    for more, shown in (({}, "Total: "), ({"no_stop_trim": True}, "Total: 12.5")):
        body = body_of(route, "Total: 12.50 and more", stop_regex=["never", r"\d+\.\d"], **more)
        answer = await api.post(route, body)
        assert text_of(route, answer).removeprefix("<user>") == shown
        assert ending_of(route, answer) == r"\d+\.\d"
        assert streamed(route, await api.events(route, body)).removeprefix("<user>") == shown
    await api.engine.received(Stop, 4)
    assert {stop.matched for stop in api.engine.of(Stop)} == {r"\d+\.\d"}


async def test_samples_share_a_pattern_and_not_its_state(api) -> None:
    answers = await api.post("/generate", {"text": ["ab12", "12ab"], "sampling_params": {"n": 2, "stop_regex": r"[a-z]\d"}})
    assert [answer["text"] for answer in answers] == ["a", "a", "12ab", "12ab"]


@pytest.mark.parametrize("rule", [{"stop": "b"}, {"stop_regex": "[b]"}])
@pytest.mark.parametrize("route", ROUTES[:2])
async def test_text_ends_nothing_before_the_minimum(api, route, rule) -> None:
    least = {"min_new_tokens": 4} if route == "/generate" else {"min_tokens": 4}
    assert text_of(route, await api.post(route, body_of(route, "abcabc", **rule, **least))) == "abca"
    assert text_of(route, await api.post(route, body_of(route, "abcabc", **rule))) == "a"


@pytest.mark.parametrize("route", ROUTES)
async def test_an_interval_of_its_own(make_api, route) -> None:
    api = await make_api(generation=GenerationSettings(stream_interval=2))
    counts = {}
    for interval in (None, 1, 5, 1000):
        events = await api.events(route, body_of(route, "abcdefghijklmnop", stream_interval=interval))
        if route == "/generate":
            counts[interval] = len(events) - 1
        else:
            choices = [choice for event in events[:-1] for choice in event["choices"]]
            counts[interval] = sum(bool(choice.get("text") or choice.get("delta", {}).get("content")) for choice in choices)
    assert counts[1] > counts[None] > counts[5] > counts[1000] == 2


async def test_each_prompt_has_its_interval(api) -> None:
    body = {"text": ["abcdefgh", "abcdefgh"], "sampling_params": [{"stream_interval": 1}, {"stream_interval": 100, "n": 2}]}
    seen = [event["index"] for event in (await api.events("/generate", body))[:-1]]
    assert (seen.count(0), seen.count(1), seen.count(2)) == (9, 2, 2)


async def test_incremental_events_add_up_to_the_answer(make_api) -> None:
    api = await make_api(generation=GenerationSettings(incremental_streaming_output=True))
    whole = await make_api()
    body = {
        "text": ["größe STx", "ab"],
        "sampling_params": {"stop": "ST", "n": 2, "stream_interval": 2},
        "return_logprob": True,
        "top_logprobs_num": 1,
        "logprob_start_len": 0,
        "return_prompt_token_ids": True,
    }
    plain = await whole.post("/generate", body)
    *events, done = await api.events("/generate", body)
    assert done == "[DONE]"
    for index, wanted in enumerate(plain):
        parts = [event for event in events if event["index"] == index]
        assert len(parts) > 1
        assert "".join(part["text"] for part in parts) == wanted["text"]
        assert list(itertools.chain(*(part["output_ids"] for part in parts))) == wanted["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert list(itertools.chain(*(part["meta_info"][name] for part in parts))) == wanted["meta_info"][name]
        last = parts[-1]["meta_info"]
        assert last["completion_tokens"] == wanted["meta_info"]["completion_tokens"]
        assert last["input_token_logprobs"] == wanted["meta_info"]["input_token_logprobs"]
        assert ["prompt_token_ids" in part for part in parts] == [True, *[False] * (len(parts) - 2), True]


async def test_prompt_ids_on_the_native_route(api) -> None:
    ids = api.service.manager.tokenizer.encode("abc").tolist()
    assert (await api.generate("abc", return_prompt_token_ids=True))["prompt_token_ids"] == ids
    assert "prompt_token_ids" not in await api.generate("abc")


@pytest.mark.parametrize("echo", [False, True])
async def test_ids_in_completions(api, echo) -> None:
    encode = api.service.manager.tokenizer.encode
    body = {"prompt": ["abc", "d"], "return_token_ids": True, "echo": echo, "stop": "c"}
    choices = (await api.post("/v1/completions", body))["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [encode("abc").tolist(), encode("d").tolist()]
    assert [choice["token_ids"] for choice in choices] == [encode("abc").tolist(), [*encode("d").tolist(), EOS]]
    events = (await api.events("/v1/completions", body))[:-1]
    for wanted in choices:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == wanted["index"]]
        assert list(itertools.chain(*(part["token_ids"] for part in parts))) == wanted["token_ids"]
        assert ["prompt_token_ids" in part for part in parts] == [True, *[False] * (len(parts) - 1)]
    only = (await api.post("/v1/completions", {"prompt": "abc", "return_prompt_token_ids": True}))["choices"][0]
    assert only["prompt_token_ids"] == encode("abc").tolist()
    assert "token_ids" not in only


async def test_ids_in_chats(api) -> None:
    encode = api.service.manager.tokenizer.encode
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "n": 2}
    answer = await api.post("/v1/chat/completions", body)
    prompt = encode("<user>hi\n<assistant>").tolist()
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*prompt, EOS]] * 2
    events = (await api.events("/v1/chat/completions", body))[:-1]
    assert [event.get("prompt_token_ids") for event in events] == [prompt, *[None] * (len(events) - 1)]
    for index in (0, 1):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert list(itertools.chain(*(part.get("token_ids", []) for part in parts))) == [*prompt, EOS]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_told_apart_by_their_ids(api, stream) -> None:
    ids = api.service.manager.tokenizer.encode("ab").tolist()
    names = [f"token_id:{id}" for id in (*ids, *ids, EOS)]
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True, "stream": stream}
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in (await api.events("/v1/completions", body))[:-1]]
    else:
        parts = [(await api.post("/v1/completions", body))["choices"][0]["logprobs"]]
    assert list(itertools.chain(*(part["tokens"] for part in parts))) == names
    assert list(itertools.chain(*(part["text_offset"] for part in parts))) == [0, 1, 2, 3, 4]  # of the text, whatever a token is called
    assert all(key.startswith("token_id:") for part in parts for top in part["top_logprobs"] if top for key in top)
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    entry = (await api.post("/v1/chat/completions", chat))["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{api.service.manager.tokenizer.encode('<')[0]}"
    assert entry["bytes"] == [ord("<")]
    assert entry["top_logprobs"][0]["token"] == "token_id:0"


async def test_many_prompts_of_a_completion_have_names_keys_and_priorities_of_their_own(api) -> None:
    body = {"prompt": ["a", "b"], "rid": ["x", "y"], "cache_salt": ["s", "t"], "extra_key": "k", "priority": [1, 2]}
    await api.post("/v1/completions", body)
    first, second = api.engine.of(Generate)
    assert (first.rids, second.rids, first.priority, second.priority) == (("x",), ("y",), 1, 2)
    assert first.namespace != second.namespace
    await api.post("/v1/completions", {"prompt": "a", "cache_salt": "t", "extra_key": "k"})
    assert api.engine.of(Generate)[-1].namespace == second.namespace


@pytest.mark.parametrize("best_of", [1, 3])
async def test_each_prompt_is_echoed_before_its_own_samples(api, best_of) -> None:
    ids = api.service.manager.tokenizer.encode("cd").tolist()
    body = {"prompt": ["a", "b"], "n": 1, "best_of": best_of, "echo": True}
    assert [choice["text"] for choice in (await api.post("/v1/completions", body))["choices"]] == ["aa", "bb"]
    assert (await api.post("/v1/completions", {"prompt": ids, "echo": True}))["choices"][0]["text"] == "cdcd"


async def test_special_tokens_before_a_prompt_can_be_left_out(make_api, tmp_path) -> None:
    directory = write_model(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "</s>", "add_bos_token": True}))
    api = await make_api(directory=directory)
    lengths = []
    for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        lengths.append((await api.post("/v1/completions", {"prompt": "abc", "max_tokens": 1, **more}))["usage"]["prompt_tokens"])
        chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1, **more}
        lengths.append((await api.post("/v1/chat/completions", chat))["usage"]["prompt_tokens"])
    frame = len("<user>abc\n<assistant>")
    assert lengths == [4, frame, 3, frame, 4, frame + 1]


async def test_a_chat_echoes_the_message_that_it_goes_on_with(api) -> None:
    parts = [{"type": "text", "text": "Once"}]
    for content in ("Once", parts):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 3, "n": 2}
        answer = await api.post("/v1/chat/completions", body)
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["Once<us"] * 2
        events = await api.events("/v1/chat/completions", body)
        assert streamed("/v1/chat/completions", events) == "OnceOnce<<uuss"  # two samples, chunk by chunk
    assert answer["usage"]["completion_tokens"] == 6
    plain = {"messages": [{"role": "user", "content": "hi"}], "echo": True, "max_tokens": 3}
    assert text_of("/v1/chat/completions", await api.post("/v1/chat/completions", plain)) == "<us"  # not the assistant's: not echoed


async def test_logs_and_metrics_can_be_declined(api) -> None:
    def measured() -> float:
        return api.service.metrics._first._sum.get()

    before = measured()
    for route in ROUTES:
        await api.post(route, {**body_of(route, "a"), "no_logs": True, "log_metrics": False})
    assert measured() == before
    await api.generate("a")
    assert measured() > before


async def test_a_rid_that_is_used_twice_says_where(api) -> None:
    async def refusal(body):
        error = (await api.post("/generate", body, status=400))["error"]
        assert (error["code"], error["param"]) == ("duplicate_rid", "rid")
        return error["message"]

    assert "two outputs of this request" in await refusal({"text": ["a", "b"], "rid": ["r", "r"]})
    assert "two outputs of this request" in await refusal({"text": ["a", "b"], "rid": ["r-0", "r"], "sampling_params": {"n": 2}})
    api.engine.hold()
    task = asyncio.create_task(api.post("/generate", {"text": "abc", "rid": "r", "sampling_params": {"n": 2}}))
    await api.engine.received(Generate)
    for rid in ("r", "r-0", "r-1"):
        assert "live request" in await refusal({"text": "a", "rid": rid})
    assert await api.post("/abort_request", {"rid": "r-1"}) == {"aborted": 1}
    async with asyncio.timeout(10):
        while "r-1" in api.service.client.outputs:
            await asyncio.sleep(0)
    assert await api.post("/abort_request", {"rid": "r"}) == {"aborted": 1}
    await task
    assert api.service.client.groups == {}
    api.engine.release()
    await api.post("/generate", {"text": "a", "rid": "r"})


async def test_prompts_are_cut_to_their_last_tokens(api) -> None:
    for route in ROUTES:
        await api.post(route, {**body_of(route, "abcdef"), "truncate_prompt_tokens": 3})
    decode = api.service.manager.tokenizer.decode
    assert [decode(sent.prompt) for sent in api.engine.of(Generate)] == ["def", "def", "nt>"]
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 0, "max_tokens": 1}
    answer = await api.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == "efe"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["e", "f", "e"]
    ids = api.service.manager.tokenizer.encode("abcdef").tolist()
    assert (await api.post("/generate", {"input_ids": ids, "truncate_prompt_tokens": 4}))["text"] == "cdef"
    assert (await api.generate("ab", truncate_prompt_tokens=400))["text"] == "ab"
    # -1: as many as leave room for the output.
    asked = {"text": "x" * 600 + "end", "truncate_prompt_tokens": -1, "sampling_params": {"max_new_tokens": 40}}
    assert (await api.post("/generate", asked))["meta_info"]["prompt_tokens"] == 512 - 40
    assert decode(api.engine.of(Generate)[-1].prompt).endswith("xend")


@pytest.mark.parametrize("route", ROUTES)
async def test_va06_prompts_that_are_too_long_are_cut_when_the_server_is_told_to(make_api, route) -> None:
    api = await make_api(context_length=64, generation=GenerationSettings(allow_auto_truncate=True))
    for size in (64, 65, 128, 10_000):
        body = body_of(route, "x" * size + "end")
        answer = await api.post(route, body)
        sent = api.engine.of(Generate)[-1]
        assert len(sent.prompt) + sent.params.max_new_tokens <= 64
        assert len(sent.prompt) == 48  # a quarter is for the output
        assert "end" in api.service.manager.tokenizer.decode(sent.prompt)
        count = answer["meta_info"] if route == "/generate" else answer["usage"]
        assert count["prompt_tokens"] == 48
    short = body_of(route, "abc")
    await api.post(route, short)
    assert len(api.engine.of(Generate)[-1].prompt) == (3 if route != "/v1/chat/completions" else 21)


async def test_a_cut_prompt_keeps_its_first_special_token(make_api, tmp_path) -> None:
    directory = write_model(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "</s>", "add_bos_token": True}))
    api = await make_api(directory=directory, context_length=64, generation=GenerationSettings(allow_auto_truncate=True))
    for text in ("a" * 100, "a" * 100_000, "</s>" + "a" * 100_000):
        await api.generate(text)
        prompt = api.engine.of(Generate)[-1].prompt
        assert (len(prompt), prompt[0]) == (48, EOS)
        assert np.all(prompt[1:] == prompt[-1])


async def test_defaults_come_from_the_flag_and_the_model(make_api, tmp_path) -> None:
    directory = write_model(tmp_path)
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    preferred = json.dumps({"temperature": 0.3, "stop": "c", "max_new_tokens": 5, "seed": 9})
    sent = {}
    for name, settings in {
        "model": GenerationSettings(),
        "openai": GenerationSettings(sampling_defaults="openai"),
        "preferred": GenerationSettings(preferred_sampling_params=preferred),
    }.items():
        api = await make_api(directory=directory, generation=settings, sampling=model)
        for route in ROUTES:
            await api.post(route, BARE[route])
        sent[name] = [generate.params for generate in api.engine.of(Generate)]
        own = {"temperature": 1.5, "top_k": -1, "top_p": 1, "seed": 3, "stop": None, "max_tokens": 7}
        await api.post("/v1/completions", {"prompt": "ab", **own})
        params = api.engine.of(Generate)[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.seed, params.max_new_tokens) == (1.5, -1, 1, 3, 7)
        assert params.stop == (("c",) if name == "preferred" else ())
    assert [(p.temperature, p.top_k, p.top_p) for p in sent["model"]] == [(1, -1, 1), (0.6, 20, 0.95), (0.6, 20, 0.95)]
    assert [(p.temperature, p.top_k, p.top_p) for p in sent["openai"]] == [(1, -1, 1)] * 3
    assert [(p.temperature, p.top_k, p.top_p) for p in sent["preferred"]] == [(0.3, -1, 1), (0.3, 20, 0.95), (0.3, 20, 0.95)]
    assert [(p.max_new_tokens, p.seed) for p in sent["preferred"]] == [(5, 9)] * 3
    assert [p.max_new_tokens for p in sent["model"]] == [128, 16, 512 - len("<user>ab\n<assistant>")]


async def test_the_defaults_are_shown(make_api) -> None:
    api = await make_api(sampling={"top_k": 1})
    info = await (await api.http.get("/server_info")).json()
    assert info["sampling_defaults"] == "model"
    assert info["default_sampling_params"] == {
        "native": {"max_new_tokens": 128},
        "completions": {"max_new_tokens": 16, "top_k": 1},
        "chat": {"max_new_tokens": 2**31 - 1, "top_k": 1},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ('{"tempersture": 1}', "keys among"),
        ('{"n": 2}', "keys among"),
        ('{"temperature": 900}', "temperature must be between"),
        ('{"stop_regex": "("}', "stop_regex"),
        ('{"top_k": "x"}', "top_k"),
    ],
)
def test_defaults_that_no_request_could_ask_for_end_the_start(model_dir, text, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        defaults_of(make_resolved(model_dir, generation=GenerationSettings(preferred_sampling_params=text)))
    assert "--preferred-sampling-params" in str(caught.value)


def test_a_wrong_value_of_the_models_names_the_way_out(model_dir) -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p must be .*--sampling-defaults openai"):
        defaults_of(make_resolved(model_dir, sampling={"top_p": 7}))
    ignored = make_resolved(model_dir, sampling={"top_p": 7}, generation=GenerationSettings(sampling_defaults="openai"))
    assert defaults_of(ignored) == Defaults()


async def test_millions_of_ids_are_detokenized_off_the_loop(api) -> None:
    ids = api.service.manager.tokenizer.encode("ab").tolist()
    loop, turns = asyncio.get_running_loop(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not task.done():
            loop.call_later(0.005, turn)

    task = asyncio.create_task(api.post("/detokenize", {"tokens": ids * 500_000}))
    loop.call_soon(turn)
    assert len((await task)["text"]) == 1_000_000
    assert turns > 10
