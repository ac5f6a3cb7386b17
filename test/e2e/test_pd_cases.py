"""Answers of a prefill/decode pair where others have failed: scarce pages, an early end of sequence, stop strings, cache reports.

Each test names the case of the project's list of field reports that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e.asks import CHAT, GREEDY, ROUTES, body_for, letters
from e2e.pd import Front, Pair
from e2e.pd_prompts import ids
from e2e.reference import solo
from e2e.servers import ASCII_BIAS, Server, together

EOS = {"2": 100}  # the tiny model's end of sequence


def native(prompt: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens, **sampling}}


def check_all(pair: Pair, server: Server, bodies: list[dict[str, Any]]) -> None:
    """All at once answer as each does alone; nothing is left behind."""
    expected = [solo(server, body)[0] for body in bodies]
    found = together([lambda body=body: pair.generate(**body) for body in bodies])
    assert sum(reference.check(output) for reference, output in zip(expected, found, strict=True)) <= 1
    pair.settled()


def test_pd_14_a_decode_server_that_runs_out_of_pages_goes_on_later(pair: Callable[..., Pair], server: Server) -> None:
    # Admission believes in short outputs, so that more requests land than can stay.
    short = pair(decode=("--max-total-tokens", "768", "--schedule-conservativeness", "0.05"))
    before = short.decode.metric("num_retracted_requests")
    check_all(short, server, [native(ids(20 + index, 40), 180) for index in range(6)])
    assert short.decode.metric("num_retracted_requests") > before
    short.flush()


@pytest.mark.parametrize("scarce", ["decode", "prefill", "both"])
def test_pd_15_prompts_of_many_chunks_do_not_wait_for_each_other_in_a_ring(pair: Callable[..., Pair], server: Server, scarce: str) -> None:
    # Pages for two prompts, each of four chunks.
    pages = ("--max-total-tokens", "320")
    options = {name: pages for name in ("prefill", "decode") if scarce in (name, "both")}
    tight = pair("--chunked-prefill-size", "32", **options)
    check_all(tight, server, [native(ids(40 + index, 128), 20) for index in range(6)])


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_pd_18_an_end_of_sequence_that_comes_first(pair: Callable[..., Pair], server: Server, route: str, ignored: bool) -> None:
    body = body_for(route, temperature=0, logit_bias=EOS, ignore_eos=ignored, max_new_tokens=8)
    if route == "/generate":
        body["text"] = "hello " * 20
    elif route == "/v1/completions":
        body["prompt"] = "hello " * 20

    def ending(answer: Any) -> Any:
        if route == "/generate":
            return answer["meta_info"]["finish_reason"]
        return [choice["finish_reason"] for choice in answer["choices"]][-1:]

    both = pair()
    expected = ending(server.post(route, body).json)
    assert ending(both.post(route, body).json) == expected
    events = list(both.stream(route, body))  # to [DONE], or it raises
    assert ending(events[-1]) == expected
    both.settled()


@pytest.fixture(scope="module")
def whole(server: Server) -> str:
    """What is written without a stop string."""
    return str(letters(server)["text"])


def check_stops(asked: Pair | Server, whole: str) -> None:
    """A stop string that is spread over two tokens ends the text where it first stands, on every route."""
    stop = whole[20:22]
    wish = {"temperature": 0, "ignore_eos": True, "logit_bias": ASCII_BIAS, "stop": ["never here", stop]}
    for kept in (False, True):
        text = whole[: whole.index(stop)] + (stop if kept else "")
        body = {"text": "letters", "sampling_params": {**wish, "max_new_tokens": 40, "no_stop_trim": kept}}
        answer = asked.generate(**body)
        assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, {"type": "stop", "matched": stop})
        assert list(asked.stream("/generate", body))[-1]["text"] == text
        plain = {"model": "tiny", "prompt": "letters", "max_tokens": 40, **wish, "no_stop_trim": kept}
        choice = asked.post("/v1/completions", plain).json["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == (text, "stop", stop)
        assert "".join(event["choices"][0]["text"] for event in asked.stream("/v1/completions", plain)) == text
    chat = {"model": "tiny", **CHAT, "max_tokens": 40, **wish, "stop": None}
    said = asked.post("/v1/chat/completions", chat).json["choices"][0]["message"]["content"]
    assert len(said) == 40
    chat["stop"] = said[10:12]
    text = said[: said.index(said[10:12])]
    assert asked.post("/v1/chat/completions", chat).json["choices"][0]["message"]["content"] == text
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in asked.stream("/v1/chat/completions", chat)]
    assert "".join(pieces) == text


def test_st_12_stop_strings_over_two_tokens_on_every_route(pair: Callable[..., Pair], whole: str) -> None:
    both = pair()
    check_stops(both, whole)
    both.settled()


def test_st_12_stop_strings_through_the_load_balancer(pair: Callable[..., Pair], whole: str) -> None:
    both = pair()
    front = Front.mini_lb(both)
    check_stops(front, whole)
    assert front.close() == 0
    both.settled()


def test_pc_08_cached_tokens_are_counted_once(pair: Callable[..., Pair], server: Server) -> None:
    both = pair()
    page = both.decode.server_info()["page_size"]
    prompt = ids(60, 200)

    def cached(where: Pair | Server) -> int:
        meta = where.generate(**native(prompt, 4))["meta_info"]
        assert meta["cached_tokens"] <= meta["prompt_tokens"] == 200
        return int(meta["cached_tokens"])

    both.flush()
    server.flush()
    assert (cached(both), cached(server)) == (0, 0)
    warm = cached(server)
    assert warm > 0
    assert abs(cached(both) - warm) <= page, "both servers have it"
    both.decode.flush()
    assert abs(cached(both) - warm) <= page, "prefill has it"
    both.decode.flush()
    both.decode.generate(**native(prompt[:100], 1))  # without a room: computed there
    assert abs(cached(both) - warm) <= page, "prefill has it, and decode its first half"
    both.prefill.flush()
    assert abs(cached(both) - warm) <= page, "decode has it"
