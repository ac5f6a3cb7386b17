"""Streams, stop strings, finish reasons and log-probabilities of a live server.

Each test names the case of the project's list of field reports that it stands for; the default server must be alive after each.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from e2e.asks import CHAT, GREEDY, ROUTES, body_for, letters, refused, text_of
from e2e.servers import ASCII_BIAS, Server, together

pytestmark = pytest.mark.usefixtures("alive")


def test_st_03_running_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for route in ROUTES[1:]:
        chunks = list(server.stream(route, {**body_for(route, max_new_tokens=12, ignore_eos=True), "stream_options": options}))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert chunks[-1]["choices"] == []


def test_st_04_stop_strings_hold_back_little(server: Server) -> None:
    body = {**body_for("/v1/completions", max_new_tokens=30, temperature=0, ignore_eos=True, logit_bias=ASCII_BIAS), "stop": ["€"]}
    texts = [chunk["choices"][0]["text"] for chunk in server.stream("/v1/completions", body)]
    assert any(texts[:3])
    assert len("".join(texts)) == 30


def test_st_05_stop_string_kept_or_trimmed(server: Server) -> None:
    whole = letters(server)["text"]
    stop = whole[20:22]
    end = whole.index(stop)
    for more, expected in (({}, whole[:end]), ({"no_stop_trim": True}, whole[: end + 2])):
        answer = letters(server, stop=["never here", stop], **more)
        assert answer["text"] == expected
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    wish = {"prompt": "letters", "temperature": 0, "ignore_eos": True, "max_tokens": 40, "logit_bias": ASCII_BIAS, "stop": stop}
    choice = server.post("/v1/completions", {**wish, "include_stop_str_in_output": True}).json["choices"][0]
    assert choice["text"] == whole[: end + 2]
    assert choice["finish_reason"] == "stop"
    assert "".join(chunk["choices"][0]["text"] for chunk in server.stream("/v1/completions", wish)) == whole[:end]


@pytest.mark.parametrize("route", ROUTES)
def test_st_06_length_and_stop_are_told_apart(server: Server, route: str) -> None:
    def ending(**sampling: Any) -> tuple[str, int]:
        answer = server.post(route, body_for(route, **sampling)).json
        if route == "/generate":
            return answer["meta_info"]["finish_reason"]["type"], answer["meta_info"]["completion_tokens"]
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    forced = {"temperature": 0, "logit_bias": {"2": 100}}  # 2 is the end of sequence
    assert ending(max_new_tokens=7, ignore_eos=True) == ("length", 7)
    assert ending(max_new_tokens=7, **forced) == ("stop", 1)
    assert ending(max_new_tokens=7, ignore_eos=True, **forced) == ("length", 7)
    assert ending(max_new_tokens=7, temperature=0, logit_bias={"40": 100}, stop_token_ids=[40]) == ("stop", 1)
    assert ending(max_new_tokens=7, temperature=0, logit_bias={"40": 100}, stop=["FF"], ignore_eos=True) == ("stop", 2)  # 40 is "F"


def test_st_07_matched_names_what_ended_it(server: Server) -> None:
    whole = letters(server)
    assert letters(server, stop=whole["text"][5])["meta_info"]["finish_reason"]["matched"] == whole["text"][5]
    token = whole["output_ids"][5]
    assert letters(server, stop_token_ids=[token])["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    ended = server.generate(text="a", sampling_params={"temperature": 0, "logit_bias": {"2": 100}})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


@pytest.mark.parametrize("route", ROUTES)
def test_st_08_errors_before_the_first_token_are_http_errors(server: Server, route: str) -> None:
    refused(server, route, {**body_for(route, temperature=-1), "stream": True})
    refused(server, route, {**body_for(route, max_new_tokens=10**6), "stream": True})


@pytest.mark.parametrize("route", ROUTES)
def test_st_09_an_abort_in_mid_stream_is_told(server: Server, route: str) -> None:
    rid = f"abort-{route}"
    events = server.stream(route, {**body_for(route, max_new_tokens=3500, ignore_eos=True), "rid": rid})
    seen = [next(events), next(events)]
    assert server.post("/abort_request", {"rid": rid}).json == {"aborted": 1}
    seen += list(events)
    if route == "/generate":
        assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert seen[-1]["meta_info"]["completion_tokens"] < 3500
    else:
        assert "error" in seen[-1]
        assert not any(choice["finish_reason"] for event in seen[:-1] for choice in event["choices"])


def test_st_10_text_leaves_at_once(server: Server) -> None:
    started = time.monotonic()
    events = server.stream("/generate", {"text": "flow", "sampling_params": {**GREEDY, "max_new_tokens": 400}})
    times = [time.monotonic() - started for _ in events]
    assert times[0] < 0.4 * times[-1]
    assert len(times) > 100


def test_st_11_intervals_change_nothing(server: Server, odd: Server) -> None:
    expected = text_of(server, temperature=0)
    for each in (server, odd):
        for route in ROUTES:
            base = {"text": "once upon"} if route == "/generate" else {"prompt": "once upon"}
            if route == "/v1/chat/completions":
                base = CHAT
            wish = body_for(route, temperature=0, ignore_eos=True, max_new_tokens=32) | base
            streamed = list(each.stream(route, wish))
            if route == "/generate":
                assert streamed[-1]["text"] == expected
                continue
            parts = [
                choice.get("text") or choice.get("delta", {}).get("content") or "" for event in streamed for choice in event["choices"]
            ]
            plain = server.post(route, wish).json["choices"][0]
            assert "".join(parts) == (plain["text"] if "text" in plain else plain["message"]["content"])
            assert len(streamed) < 20 or each is server


def test_lp_01_logprobs_0_means_the_token_alone(server: Server) -> None:
    choice = server.post("/v1/completions", {**body_for("/v1/completions"), "logprobs": 0}).json["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) > 0
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert not choice["logprobs"]["top_logprobs"]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("token", [-1, 259, 10**9])
def test_lp_05_token_ids_outside_the_vocabulary(server: Server, token: int, asked: bool) -> None:
    refused(server, "/generate", {**body_for("/generate"), "return_logprob": asked, "token_ids_logprob": [token]}, "token_ids_logprob")


def test_lp_06_echo_with_max_tokens_0(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0}).json
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 5
    assert answer["usage"]["completion_tokens"] == 0


def test_lp_07_echo_scores_belong_to_their_positions(server: Server) -> None:
    def scores(prompt: str) -> dict[str, Any]:
        answer = server.post("/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}).json
        return answer["choices"][0]["logprobs"]  # type: ignore[no-any-return]

    one, two = scores("the quick brown fox"), scores("the quick brown dog")
    assert one["token_logprobs"][1:16] == pytest.approx(two["token_logprobs"][1:16], abs=2e-3)
    assert one["token_logprobs"][16] != pytest.approx(two["token_logprobs"][16], abs=1e-3)
    assert len({json.dumps(entry) for entry in one["top_logprobs"][1:]}) > 10


def test_lp_09_each_row_has_its_own_wishes(server: Server) -> None:
    wishes: list[dict[str, Any]] = [{}, {"return_logprob": True, "token_ids_logprob": [7, 9]}, {"return_logprob": True}, {}]
    found = together(
        [lambda wish=wish: server.generate(**body_for("/generate", max_new_tokens=20, ignore_eos=True), **wish) for wish in wishes]
    )
    assert ["output_token_logprobs" in answer["meta_info"] for answer in found] == [False, True, True, False]
    assert [[token for _, token, _ in entry] for entry in found[1]["meta_info"]["output_token_ids_logprobs"]] == [[7, 9]] * 20
