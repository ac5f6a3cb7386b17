"""Generation fields on live servers: the default one, and one with a SentencePiece model and the flags that shape answers.

Tests of a case in the project's list of field reports carry its name; the default server must be alive after each.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import sentencepiece
from e2e.asks import GREEDY, ROUTES, body_for, chat, letters
from e2e.servers import ASCII_BIAS, Server
from models.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("alive")

SP_MODEL = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}"
CONTEXT = 256
# A byte that begins no character: the last of the byte-level alphabet, after the three special tokens.
BAD_BYTE = 3 + sorted([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]).index(0xFF)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A SentencePiece model whose authors recommend one best token; long prompts are cut, native events hold what is new."""
    directory = tmp_path_factory.mktemp("spoken")
    save_tiny(directory, "llama", vocab_size=32000, max_position_embeddings=CONTEXT)
    shutil.copy(SP_MODEL, directory / "tokenizer.model")
    (directory / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "chat_template": TEMPLATE}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 1}))
    flags = ("--allow-auto-truncate", "--incremental-streaming-output", "--preferred-sampling-params", '{"ignore_eos": true}')
    server = Server(directory, "--max-total-tokens", "2048", *flags)
    yield server
    assert server.close() == 0


def text_of(route: str, answer: Any) -> str:
    if route == "/generate":
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def deltas(route: str, events: list[Any]) -> str:
    """Text of a stream whose events hold what is new."""
    if route == "/generate":
        return "".join(event["text"] for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def test_st_01_tokens_that_are_no_text_flow_and_cost_no_more_later(server: Server) -> None:
    body = {"text": "bytes", "sampling_params": {**GREEDY, "max_new_tokens": 400, "logit_bias": {str(BAD_BYTE): 100}}}
    halves = []
    for _ in range(3):  # a busy machine may be slow for a while; a window that grows is slow every time
        times, lengths = [time.monotonic()], [0]
        for event in server.stream("/generate", body):
            times.append(time.monotonic())
            lengths.append(len(event["text"]))
        assert set(event["text"]) == {"\ufffd"}
        assert event["output_ids"] == [BAD_BYTE] * 400
        # Text arrives while the output grows, never more than a few tokens behind.
        counts = range(len(lengths))
        assert all(length >= count - 8 for count, length in zip(counts, lengths)), lengths
        middle = len(times) // 2
        halves.append((times[-1] - times[middle]) / (times[middle] - times[0]))
        if halves[-1] < 3:
            return
    raise AssertionError(f"second half against first: {halves}")


@pytest.mark.parametrize("prompt", ["The weather in Paris", "Größe: 12", "a", "x  y "])
def test_st_02_sentencepiece_words_keep_their_spaces(shaped: Server, prompt: str) -> None:
    spoken = sentencepiece.SentencePieceProcessor(model_file=str(SP_MODEL))
    no_words = [id for id in range(spoken.vocab_size()) if spoken.is_control(id) or spoken.is_unknown(id) or spoken.is_byte(id)]
    words = {"logit_bias": {str(id): -100 for id in no_words}, "max_tokens": 40, "ignore_eos": True}
    for sampling in ({"temperature": 0}, {"temperature": 1.3, "seed": 5, "top_k": -1}):
        body = {"prompt": prompt, **words, **sampling, "return_token_ids": True}
        choices = [choice for event in shaped.stream("/v1/completions", body) for choice in event["choices"]]
        before = choices[0]["prompt_token_ids"][1:]  # the first one begins every text and is none
        ids = [id for choice in choices for id in choice["token_ids"]]
        assert len(ids) == 40
        shown = "".join(choice["text"] for choice in choices)
        assert spoken.decode(before) + shown == spoken.decode(before + ids)
        assert len(shown.split()) > 3
        assert shown == text_of("/v1/completions", shaped.post("/v1/completions", body).json)


@pytest.mark.parametrize("interval", [1, 7])
def test_st_11_incremental_streams_add_up(shaped: Server, interval: int) -> None:
    for route in ROUTES:
        body = body_for(route, temperature=0, max_new_tokens=40, stream_interval=interval)
        if route == "/generate":
            body |= {"return_logprob": True}
        plain, events = shaped.post(route, body).json, list(shaped.stream(route, body))
        assert deltas(route, events) == text_of(route, plain)
        assert (len(events) > 20) == (interval == 1)
        if route == "/generate":
            assert [id for event in events for id in event["output_ids"]] == plain["output_ids"]
            scores = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
            assert [id for _, id, _ in scores] == plain["output_ids"]
            assert [score for score, *_ in scores] == pytest.approx(
                [score for score, *_ in plain["meta_info"]["output_token_logprobs"]], abs=2e-3
            )


@pytest.mark.parametrize("route", ROUTES)
def test_va_06_prompts_over_the_context_are_cut(shaped: Server, route: str) -> None:
    assert shaped.server_info()["allow_auto_truncate"] is True
    long = " word" * (2 * CONTEXT)
    text = {"/generate": {"text": long}, "/v1/completions": {"prompt": long}}.get(route, {"messages": [{"role": "user", "content": long}]})
    for most in (None, 8, 10 * CONTEXT):
        body = body_for(route, max_new_tokens=most, temperature=0) | text
        answer = shaped.post(route, body)
        assert answer.status == 200, answer.body
        usage = answer.json["meta_info"] if route == "/generate" else answer.json["usage"]
        assert usage["prompt_tokens"] >= CONTEXT // 2
        assert usage["prompt_tokens"] + usage["completion_tokens"] <= CONTEXT
        assert usage["completion_tokens"] >= 8
    ids = shaped.generate(text=long, sampling_params={"max_new_tokens": 1}, return_prompt_token_ids=True)["prompt_token_ids"]
    assert ids[0] == 1  # the token that begins every text stays


def test_sa_05_a_default_that_forces_greedy_is_the_models_own_and_shown(shaped: Server) -> None:
    info = shaped.server_info()
    assert info["sampling_defaults"] == "model"
    assert info["default_sampling_params"]["completions"] == {"max_new_tokens": 16, "top_k": 1, "ignore_eos": True}
    assert info["default_sampling_params"]["native"] == {"max_new_tokens": 128, "ignore_eos": True}

    def texts(**fields: Any) -> int:
        found = [shaped.post("/v1/completions", {"prompt": "hi", "max_tokens": 8, "temperature": 2, **fields}).json for _ in range(6)]
        return len({text_of("/v1/completions", answer) for answer in found})

    assert texts() == 1
    assert texts(top_k=-1) >= 2
    assert len({shaped.generate(text="hi", sampling_params={"temperature": 2, "max_new_tokens": 8})["text"] for _ in range(6)}) >= 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("pattern", [r"[a-z][A-Z!-/]", r"(?s:.{5})[A-Z]", r"[A-M]+[0-9n-z]"])
def test_a_pattern_stops_where_re_finds_it(server: Server, route: str, pattern: str) -> None:
    body = body_for(route, **GREEDY, max_new_tokens=60, logit_bias=ASCII_BIAS)
    whole = text_of(route, server.post(route, body).json)
    end = next((end for end in range(len(whole) + 1) if re.search(f"(?:{pattern})$", whole[:end])), None)
    assert end is not None, whole
    found = re.search(f"(?:{pattern})$", whole[:end])
    assert found is not None
    wish = body_for(route, **GREEDY, max_new_tokens=60, logit_bias=ASCII_BIAS, stop_regex=["€+", pattern])
    kept = body_for(route, **GREEDY, max_new_tokens=60, logit_bias=ASCII_BIAS, stop_regex=["€+", pattern], no_stop_trim=True)
    for asked, expected in ((wish, whole[: found.start()]), (kept, whole[:end])):
        answer = server.post(route, asked).json
        assert text_of(route, answer) == expected
        if route == "/generate":
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
            assert answer["meta_info"]["completion_tokens"] == end  # one character a token
            assert list(server.stream(route, asked))[-1]["text"] == expected
        else:
            assert answer["choices"][0]["matched_stop"] == pattern
            assert deltas(route, list(server.stream(route, asked))) == expected


def test_a_stop_before_the_minimum_does_not_end_the_output(server: Server) -> None:
    whole = letters(server)["text"]
    for rule in ({"stop": whole[3]}, {"stop_regex": re.escape(whole[3])}):
        found = letters(server, **rule, min_new_tokens=10)
        later = whole.find(whole[3], 9)
        assert found["text"] == (whole if later < 0 else whole[:later])


def test_ct_03_a_continued_and_echoed_message_twice(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "OK! So"}]
    plain, first, second = (
        chat(server, messages, continue_final_message=True, echo=echo).json["choices"][0] for echo in (False, True, True)
    )
    assert first == second
    assert first["message"]["content"] == "OK! So" + plain["message"]["content"]


def test_one_prompt_of_many_is_named_and_aborted(server: Server) -> None:
    body = {"prompt": ["a", "b"], "rid": ["first", "second"], "max_tokens": 3000, "ignore_eos": True}
    events = server.stream("/v1/completions", body)
    next(events)
    assert server.post("/abort_request", {"rid": "second"}).json == {"aborted": 1}
    assert "error" in list(events)[-1]
