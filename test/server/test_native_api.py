"""`/generate`: shapes, finish reasons, streams against plain answers, batches, samples, log-probabilities."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from fake_engine import EOS, logprob_of
from server.events import parse_events

from radixpd.config.settings import GenerationSettings
from radixpd.runtime.messages import Generate, Stop


async def test_an_answer_has_text_ids_and_meta_info(api) -> None:
    api.engine.cached = 3
    answer = await api.generate("hello", rid="mine")
    assert answer["text"] == "hello"
    assert answer["output_ids"][-1] == EOS
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 6, 3)
    assert meta["e2e_latency"] > 0
    assert "output_token_logprobs" not in meta


async def test_put_and_input_ids_work_too(api) -> None:
    ids = api.service.manager.tokenizer.encode("abc").tolist()
    response = await api.http.put("/generate", json={"input_ids": ids})
    assert (await response.json())["text"] == "abc"


async def test_length_only_when_the_limit_ended_it(api) -> None:
    answer = await api.generate("abc", sampling={"max_new_tokens": 7, "ignore_eos": True})
    assert answer["text"] == "abcabca"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}


@pytest.mark.parametrize(("keep", "text"), [(False, "abc"), (True, "abcST")])
async def test_a_stop_string_over_two_tokens_ends_the_output(api, keep, text) -> None:
    answer = await api.generate("abcSTdef", sampling={"stop": ["x", "ST"], "no_stop_trim": keep})
    assert answer["text"] == text
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ST"}
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 5
    await api.engine.received(Stop)
    assert [(s.keep, s.matched) for s in api.engine.of(Stop)] == [(5, "ST")]


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abc")])
async def test_a_stop_token_is_counted_and_not_shown(api, keep, text) -> None:
    token = int(api.service.manager.tokenizer.encode("c")[0])
    answer = await api.generate("abcd", sampling={"stop_token_ids": [token], "no_stop_trim": keep})
    assert answer["text"] == text
    assert answer["output_ids"][-1] == token
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


async def test_special_tokens_can_be_shown(api) -> None:
    answer = await api.generate("a", sampling={"skip_special_tokens": False, "no_stop_trim": True})
    assert answer["text"] == "a</s>"


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "xy", "ß"])
async def test_a_stream_is_the_plain_answer_growing(make_api, interval, stop) -> None:
    api = await make_api(generation=GenerationSettings(stream_interval=interval))
    body = {"text": "größe 日本 xyz", "sampling_params": {"stop": stop}, "return_logprob": True}
    plain = await api.post("/generate", body)
    *chunks, done = await api.events("/generate", body)
    assert done == "[DONE]"
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    last = chunks[-1]
    for answer in (plain, last):
        del answer["meta_info"]["e2e_latency"], answer["meta_info"]["id"]
    assert last == plain
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert len(chunks) > 1 or interval == 100


async def test_a_batch_and_samples_come_back_in_order(api) -> None:
    api.engine.hold()
    task = asyncio.create_task(api.post("/generate", {"text": ["one", "two"], "sampling_params": [{"n": 2}, {"n": 1}], "rid": ["a", "b"]}))
    await api.engine.received(Generate, 2)
    first, second = api.engine.of(Generate)
    assert (first.rids, second.rids) == (("a-0", "a-1"), ("b",))
    api.engine.release()
    answers = await task
    assert [answer["text"] for answer in answers] == ["one", "one", "two"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a-0", "a-1", "b"]


async def test_a_batch_of_one_is_a_list_and_one_prompt_with_samples_too(api) -> None:
    assert len(await api.post("/generate", {"text": ["one"]})) == 1
    assert len(await api.post("/generate", {"text": "one", "sampling_params": {"n": 3}})) == 3


async def test_a_streamed_batch_tells_outputs_apart(api) -> None:
    events = await api.events("/generate", {"text": ["ab", "cd"], "sampling_params": {"n": 2}})
    last = {event["index"]: event["text"] for event in events[:-1]}
    assert last == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}


async def test_logprobs(api) -> None:
    ids = api.service.manager.tokenizer.encode("abc").tolist()
    answer = await api.post(
        "/generate",
        {
            "text": "abc",
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [7],
            "return_text_in_logprobs": True,
        },
    )
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [
        [None, ids[0], "a"],
        [pytest.approx(logprob_of(ids[1])), ids[1], "b"],
        [pytest.approx(logprob_of(ids[2])), ids[2], "c"],
    ]
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [[pytest.approx(logprob_of(id)), id] for id in [*ids, EOS]]
    assert meta["input_top_logprobs"][0] is None
    assert [[pair[1] for pair in top] for top in meta["output_top_logprobs"]] == [[0, 1]] * 4
    assert meta["output_token_ids_logprobs"][0] == [[pytest.approx(logprob_of(7)), 7, api.service.manager.tokenizer.token_text(7)]]
    assert meta["input_token_ids_logprobs"][1] == meta["output_token_ids_logprobs"][0]


async def test_logprobs_are_cut_with_the_ids(api) -> None:
    answer = await api.generate("abcSTdef", sampling={"stop": "ST"}, return_logprob=True)
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"]) == 5
    assert answer["meta_info"]["input_token_logprobs"] == []
    assert "output_top_logprobs" not in answer["meta_info"]
    assert answer["meta_info"]["output_token_logprobs"][0][2] is None


async def test_a_start_inside_the_prompt_has_no_null(api) -> None:
    answer = await api.generate("abcdef", return_logprob=True, logprob_start_len=4)
    assert [entry[0] is None for entry in answer["meta_info"]["input_token_logprobs"]] == [False, False]


async def test_only_one_prompt_of_a_batch_wants_logprobs(api) -> None:
    plain, scored = await api.post("/generate", {"text": ["ab", "cd"], "return_logprob": [False, True], "token_ids_logprob": [None, [1]]})
    assert "output_token_logprobs" not in plain["meta_info"]
    assert len(scored["meta_info"]["output_token_logprobs"]) == 3


async def test_no_tokens_at_all(api) -> None:
    answer = await api.generate("abc", sampling={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == 3


async def test_parameters_reach_the_engine(api) -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 3, "1": -2.5}, "stop_token_ids": [9], "min_new_tokens": 2, "seed": 42, "max_new_tokens": 4,
    }  # fmt: skip
    await api.post("/generate", {"text": "abcdef", "sampling_params": sampling, "priority": 7})
    (sent,) = api.engine.of(Generate)
    params = sent.params
    assert sent.priority == 7
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.logit_bias == ((1, -2.5), (5, 3))
    assert (params.stop_token_ids, params.min_new_tokens, params.seed, params.max_new_tokens) == ((9,), 2, 42, 4)


async def test_one_best_token_is_greedy(api) -> None:
    for sampling in ({"temperature": 1.5, "top_k": 1}, {"temperature": 0, "top_p": 0.1}, {"temperature": 1e-9}):
        await api.generate("a", sampling=sampling)
    assert [sent.params.temperature for sent in api.engine.of(Generate)] == [0, 0, 0]


async def test_seedless_requests_differ_and_seeds_are_kept(api) -> None:
    for _ in range(6):
        await api.generate("a")
    assert len({sent.params.seed for sent in api.engine.of(Generate)}) == 6
    await api.generate("a", sampling={"sampling_seed": 0})
    assert api.engine.of(Generate)[-1].params.seed == 0


async def test_namespaces_keep_keys_and_salts_apart(api) -> None:
    for fields in ({}, {"extra_key": "x"}, {"cache_salt": "x"}, {"extra_key": "x", "cache_salt": "x"}):
        await api.generate("a", **fields)
    spaces = [sent.namespace for sent in api.engine.of(Generate)]
    assert spaces[0] == b""
    assert len(set(spaces)) == 4


async def test_a_default_limit_is_cut_to_the_context(make_api) -> None:
    api = await make_api(context_length=64)
    answer = await api.generate("a" * 60, sampling={"ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == 4
    assert np.all(api.engine.of(Generate)[0].prompt == api.engine.of(Generate)[0].prompt[0])


async def test_a_stream_says_its_end_when_aborted(api) -> None:
    api.engine.hold()
    response_task = asyncio.create_task(
        api.http.post("/generate", json={"text": "abc", "rid": "r", "stream": True, "sampling_params": {"ignore_eos": True}})
    )
    await api.engine.received(Generate)
    api.engine.step()
    response = await response_task
    await api.post("/abort_request", {"rid": "r"})
    events = parse_events(await response.text())
    assert events[-2]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-1] == "[DONE]"


async def test_each_token_leaves_at_once(api) -> None:
    api.engine.hold()
    task = asyncio.create_task(api.http.post("/generate", json={"text": "abcdef", "stream": True, "sampling_params": {"stop": "!"}}))
    await api.engine.received(Generate)
    api.engine.step()
    response = await task
    for text in ("a", "ab", "abc"):
        event = parse_events((await response.content.readuntil(b"\n\n")).decode())[0]
        assert event["text"] == text
        api.engine.step()
    response.close()
