"""A stream adds up to the plain answer: random requests on every route, under every way of cutting the stream."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from server.events import parse_events
from server.test_request_fields import ROUTES

from radixpd.config.settings import GenerationSettings

SAMPLING = {
    "n": [1, 2, 3], "stop": ["b", "ab", "ßx", ["c", "日"]], "stop_regex": ["[ab]c", r"\d", r"x\b", "(?s).{7}"],
    "stream_interval": [1, 2, 5], "no_stop_trim": [True, False], "ignore_eos": [True], "skip_special_tokens": [False],
    "stop_token_ids": [[65], [256]],
}  # fmt: skip
NATIVE = {
    "return_logprob": [True], "top_logprobs_num": [0, 2], "return_text_in_logprobs": [True], "return_prompt_token_ids": [True],
    "truncate_prompt_tokens": [-1, 3], "logprob_start_len": [0, 1],
}  # fmt: skip
OPENAI = {
    "echo": [True], "return_token_ids": [True], "return_prompt_token_ids": [True], "return_tokens_as_token_ids": [True],
    "truncate_prompt_tokens": [-1, 3],
}  # fmt: skip


def some(dice: random.Random, options: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: dice.choice(values) for name, values in options.items() if dice.random() < 0.5}


def request(dice: random.Random, route: str) -> dict[str, Any]:
    """A random body."""
    text = "".join(dice.choice("abcx ß日1") for _ in range(dice.choice([1, 5, 20, 30])))
    sampling = some(dice, SAMPLING)
    most, least = dice.choice([(None, None), (0, 0), (5, 2), (20, 4), (20, None)])
    names = ("max_new_tokens", "min_new_tokens") if route == "/generate" else ("max_tokens", "min_tokens")
    sampling |= {name: value for name, value in zip(names, (most, least)) if value is not None}
    prompt = dice.choice([text, [text, "ab"]])
    if route == "/generate":
        return {"text": prompt, "sampling_params": sampling, **some(dice, NATIVE)}
    if route == "/v1/completions":
        return {"prompt": prompt, **sampling, **some(dice, OPENAI), **some(dice, {"logprobs": [0, 2]})}
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": text}]
    scores = dice.choice([{}, {"logprobs": True, "top_logprobs": 1}])
    return {"messages": talk, "continue_final_message": dice.choice([True, False]), **sampling, **some(dice, OPENAI), **scores}


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer of `/generate` without what differs from run to run."""
    meta = {name: value for name, value in answer["meta_info"].items() if name not in ("e2e_latency", "id")}
    return {**{name: value for name, value in answer.items() if name != "index"}, "meta_info": meta}


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Incremental events as one answer."""
    meta = dict(parts[-1]["meta_info"])
    for name in meta:
        if name.startswith("output_"):
            meta[name] = [entry for part in parts for entry in part["meta_info"][name]]
    ids = [id for part in parts for id in part["output_ids"]]
    return {**parts[-1], "text": "".join(part["text"] for part in parts), "output_ids": ids, "meta_info": meta}


def check_native(plain: Any, events: list[Any], *, incremental: bool) -> None:
    for index, wanted in enumerate(plain if isinstance(plain, list) else [plain]):
        parts = [event for event in events if event.get("index", 0) == index]
        if not incremental:
            assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(parts))
        assert lasting(joined(parts) if incremental else parts[-1]) == lasting(wanted)


def check_openai(plain: Any, events: list[Any]) -> None:
    assert events[-1]["usage"] == plain["usage"]
    for wanted in plain["choices"]:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == wanted["index"]]
        text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
        assert text == (wanted["text"] if "text" in wanted else wanted["message"]["content"])
        ends = [(part["finish_reason"], part["matched_stop"]) for part in parts if part["finish_reason"]]
        assert ends == [(wanted["finish_reason"], wanted["matched_stop"])]
        assert [id for part in parts for id in part.get("token_ids", [])] == wanted.get("token_ids", [])
        for name in ("tokens", "token_logprobs", "text_offset", "content"):
            if wanted["logprobs"] and name in wanted["logprobs"]:
                assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"][name]] == wanted["logprobs"][name]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_adds_up_to_the_plain_answer(make_api, route, incremental) -> None:
    settings = GenerationSettings(incremental_streaming_output=incremental, allow_auto_truncate=True)
    api = await make_api(generation=settings, context_length=64)
    dice = random.Random(f"{route} {incremental}")
    for _ in range(60):
        body = request(dice, route)
        plain = await api.post(route, body)
        options = {} if route == "/generate" else {"stream_options": {"include_usage": True}}
        response = await api.http.post(route, json={**body, **options, "stream": True})
        *events, done = parse_events(await response.text())
        try:
            assert done == "[DONE]"
            check_native(plain, events, incremental=incremental) if route == "/generate" else check_openai(plain, events)
        except AssertionError as error:
            raise AssertionError(f"{json.dumps(body)}: {error}") from error
