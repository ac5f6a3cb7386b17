"""The prefix cache as clients see it: what is reused, what never is, what chunks and retraction leave alone.

Case ids in names and comments are those of the project's list of field reports.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2e.reference import answers, solo
from e2e.servers import Server, together

GREEDY = {"temperature": 0, "ignore_eos": True}
LARGE = ("--max-total-tokens", "16384", "--threads", "1")
RETRACTS = ("--max-total-tokens", "1024", "--schedule-conservativeness", "0.05", "--chunked-prefill-size", "64", "--threads", "1")


def ids(length: int, seed: int) -> list[int]:
    """Random token ids of the tiny model; different seeds share no prefix."""
    dice = random.Random(seed)
    return [dice.randrange(3, 259) for _ in range(length)]


def sampling(tokens: int, **more: Any) -> dict[str, Any]:
    return {**GREEDY, "max_new_tokens": tokens, **more}


@pytest.fixture(scope="module", params=["1", "16"])
def paged(serve: Callable[..., Server], request: pytest.FixtureRequest) -> tuple[Server, int]:
    """Servers of both page sizes with room for everything."""
    return serve(*LARGE, "--page-size", request.param), int(request.param)


def test_the_same_long_prompt_again_is_cached(server: Server) -> None:
    prompt = ids(1024, 1)
    cold = server.generate(input_ids=prompt, sampling_params=sampling(8))
    warm = server.generate(input_ids=prompt, sampling_params=sampling(8))
    assert cold["meta_info"]["cached_tokens"] == 0
    assert 1008 <= warm["meta_info"]["cached_tokens"] < 1024
    assert warm["output_ids"] == cold["output_ids"]


def test_conversations_reuse_every_full_page(paged: tuple[Server, int]) -> None:
    server, page = paged
    server.flush()
    talks = [ids(30 + 7 * index, 100 + index) for index in range(8)]
    known = [0] * 8  # tokens whose KV exists, of each conversation
    for turn in range(4):
        calls = [
            lambda index=index: server.generate(input_ids=talks[index], sampling_params=sampling(11 + index)) for index in range(len(talks))
        ]
        for index, answer in enumerate(together(calls)):
            assert answer["meta_info"]["cached_tokens"] == known[index] // page * page, f"turn {turn}, conversation {index}"
            # The last token is sampled but never computed.
            known[index] = len(talks[index]) + len(answer["output_ids"]) - 1
            talks[index] = talks[index] + answer["output_ids"] + ids(9 + index, 1000 * turn + index)
    server.settled()


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_is_02_namespaces_never_share(server: Server, field: str) -> None:
    prompt, other = ids(200, 2), "cache_salt" if field == "extra_key" else "extra_key"
    server.flush()

    def cached(**names: str) -> int:
        return int(server.generate(input_ids=prompt, sampling_params=sampling(2), **names)["meta_info"]["cached_tokens"])

    assert cached(**{field: "x"}) == 0
    assert cached(**{field: "x"}) == 192
    assert cached() == 0
    assert cached(**{field: "y"}) == 0
    assert cached(**{other: "x"}) == 0, "the same value under another name is another namespace"
    assert cached(**{field: "x", other: "x"}) == 0
    assert cached(**{field: "x"}) == 192


def test_is_02_parts_of_a_namespace_are_framed(server: Server) -> None:
    prompt = ids(200, 3)
    # Joined without lengths, neighbours in this list would be the same bytes.
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("y", "x"), ("", "xextra_keyy"), ("xcache_salty", ""), ("x", "y")]
    for key, salt in pairs:
        answer = server.generate(input_ids=prompt, sampling_params=sampling(2), extra_key=key, cache_salt=salt)
        assert answer["meta_info"]["cached_tokens"] == 0


def test_sa_07_samples_share_the_prompt(paged: tuple[Server, int]) -> None:
    server, page = paged
    prompt = ids(300, 4)
    found = server.generate(input_ids=prompt, sampling_params={"temperature": 1, "ignore_eos": True, "max_new_tokens": 8, "n": 4})
    assert len(found) == 4
    assert sum(answer["meta_info"]["cached_tokens"] for answer in found) >= 3 * (300 - page)
    assert all(answer["meta_info"]["cached_tokens"] <= 300 for answer in found)


def test_pc_06_flush_while_running_is_refused_and_harmless(server: Server) -> None:
    body = {"input_ids": ids(100, 5), "sampling_params": sampling(300)}
    expected = solo(server, body)[0]
    events = server.stream("/generate", body)
    next(events)
    refused = server.post("/flush_cache")
    assert refused.status == 400
    assert "running" in refused.json["error"]["message"]
    expected.check(list(events)[-1])
    server.flush()


@pytest.mark.parametrize("how", ["length", "stop string", "stop token"])
def test_pc_06_flush_right_after_an_answer_works(server: Server, how: str) -> None:
    prompt = ids(50, 6)
    text = server.generate(input_ids=prompt, sampling_params=sampling(20, logit_bias={"40": 100}))
    end = {"length": {}, "stop string": {"stop": text["text"][3:5]}, "stop token": {"stop_token_ids": [40]}}[how]
    for _ in range(20):
        answer = server.generate(input_ids=prompt, sampling_params=sampling(20, logit_bias={"40": 100}, **end))
        assert (answer["meta_info"]["finish_reason"]["type"] == "length") == (how == "length")
        assert server.post("/flush_cache").status == 200
    server.settled()
    assert server.pages()["tree"] == 0


def test_pc_09_chunks_do_not_need_the_cache(server: Server, serve: Callable[..., Server]) -> None:
    body = {"input_ids": ids(250, 7), "sampling_params": sampling(20)}
    expected = solo(server, body)[0]
    uncached = serve("--disable-radix-cache", "--chunked-prefill-size", "64", "--threads", "1")
    for _ in range(2):
        answer = uncached.generate(**body)
        expected.check(answer)
        assert answer["meta_info"]["cached_tokens"] == 0
        assert uncached.settled()["tree"] == 0


def test_pc_10_a_conversation_grows_over_the_chunk_size(serve: Callable[..., Server]) -> None:
    server = serve(*LARGE, "--chunked-prefill-size", "64")
    talk, known = ids(20, 8), 0
    for turn in range(8):
        answer = server.generate(input_ids=talk, sampling_params=sampling(20))
        assert answer["meta_info"]["cached_tokens"] == known // 16 * 16
        known = len(talk) + 19
        talk = talk + answer["output_ids"] + ids(11 * (turn + 1) % 70, 80 + turn)  # short and long additions
    server.settled()


def test_pc_02_eviction_under_a_shared_prefix(server: Server, serve: Callable[..., Server]) -> None:
    shared = ids(250, 9)
    bodies = [{"input_ids": shared + ids(60, 90 + index), "sampling_params": sampling(40)} for index in range(6)]
    expected = [solo(server, body)[0] for body in bodies]
    small = serve(*RETRACTS)
    for _ in range(2):
        for answer, reference in zip(together([lambda body=body: small.generate(**body) for body in bodies]), expected):
            reference.check(answer)
    small.settled()


def test_pc_03_equal_new_prefixes_at_once(server: Server) -> None:
    bodies = [
        {"input_ids": ids(200, 10) + ([index] if index else []), "sampling_params": sampling(64)} for index in (0, 0, 0, 0, 20, 20, 21, 22)
    ]
    expected = [solo(server, body)[0] for body in bodies]
    server.flush()
    for answer, reference in zip(together([lambda body=body: server.generate(**body) for body in bodies]), expected):
        reference.check(answer)
    server.generate(input_ids=ids(3000, 11), sampling_params=sampling(4))
    for body, reference in zip(bodies, expected):
        reference.check(server.generate(**body))


def test_lp_03_scores_start_where_reuse_ends(server: Server) -> None:
    first = server.generate(input_ids=ids(150, 12), sampling_params=sampling(20))
    known = 150 + len(first["output_ids"])
    prompt = ids(150, 12) + first["output_ids"] + ids(40, 13)
    second = server.generate(input_ids=prompt, sampling_params=sampling(4), return_logprob=True, logprob_start_len=known)
    meta = second["meta_info"]
    # Reuse up to the token before the first scored one, whole pages of it.
    assert meta["cached_tokens"] == (known - 1) // 16 * 16
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt[known:]
    assert all(logprob is not None for logprob, _, _ in meta["input_token_logprobs"])


def test_lp_08_scores_do_not_depend_on_chunks_or_hits(server: Server, serve: Callable[..., Server]) -> None:
    prompt = ids(180, 14)
    chunked = serve(*LARGE, "--chunked-prefill-size", "64")
    body = {
        "input_ids": prompt,
        "sampling_params": sampling(3),
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 77],
    }
    server.flush()
    whole = server.generate(**body, logprob_start_len=0)["meta_info"]
    assert len(whole["input_token_logprobs"]) == 180
    assert [position for position, entry in enumerate(whole["input_token_logprobs"]) if entry[0] is None] == [0]
    for each in (server, chunked):
        each.flush()
        for start in (0, 0, 50, 128, 179):
            meta = each.generate(**body, logprob_start_len=start)["meta_info"]
            for field in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
                assert_close(meta[field], whole[field][start:])
            if start == 179:
                assert meta["cached_tokens"] >= 176 - 16


def assert_close(found: Any, expected: Any) -> None:
    """Equal structure and ids, numbers within rounding."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, two in zip(found, expected):
            assert_close(one, two)
    elif isinstance(expected, float):
        assert abs(found - expected) < 2e-3
    else:
        assert found == expected


@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)], ids=["overlap", "no-overlap"])
def test_lp_02_sc_01_sc_03_sc_07_retraction_keeps_text_and_scores(
    server: Server, serve: Callable[..., Server], flags: tuple[str, ...]
) -> None:
    bodies = [
        {"input_ids": ids(30, 20 + index), "sampling_params": sampling(150 + index), "return_logprob": True, "logprob_start_len": 0}
        for index in range(8)
    ]
    expected = [solo(server, body)[0] for body in bodies]
    small = serve(*RETRACTS, *flags)
    before = small.metric("num_retracted_requests")
    calls = [lambda body=body: list(small.stream("/generate", body))[-1] for body in bodies]
    for answer, reference in zip(together(calls), expected):
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
        reference.check(answer)
    assert small.metric("num_retracted_requests") > before
    small.settled()


def test_sc_02_a_request_over_the_pool_is_refused(serve: Callable[..., Server]) -> None:
    small = serve(*RETRACTS)
    refused = small.post("/generate", {"input_ids": ids(20, 30), "sampling_params": sampling(2000)})
    assert refused.status == 400
    assert refused.json["error"]["code"] == "context_length_exceeded"
    assert len(small.generate(input_ids=ids(20, 30), sampling_params=sampling(1004))["output_ids"]) == 1004


def test_pc_01_pc_11_nothing_is_held_after_a_mixture(server: Server) -> None:
    dice = random.Random(1)

    def one(index: int) -> int:
        kind = dice.choice(("plain", "n", "stop", "refused", "abort"))
        body: dict[str, Any] = {"input_ids": ids(dice.randrange(1, 120), index % 20), "sampling_params": sampling(dice.randrange(1, 30))}
        if kind == "n":
            body["sampling_params"] |= {"n": 3, "temperature": 1}
        elif kind == "stop":
            body["sampling_params"] |= {"stop_token_ids": ids(40, index)}
        elif kind == "refused":
            body["sampling_params"]["max_new_tokens"] = 5000
        elif kind == "abort":
            body["rid"] = f"mixture-{index}"
            return together(
                [lambda: server.post("/generate", body).status, lambda: server.post("/abort_request", {"rid": body["rid"]}).status]
            )[0]
        return server.post("/generate", body).status

    statuses = together([lambda index=index: one(index) for index in range(60)])
    assert set(statuses) == {200, 400}
    server.settled()
    server.flush()
    assert server.pages()["free"] * 16 == server.metric("max_total_num_tokens")


def test_several_prompts_of_one_body_are_one_answer_each(server: Server) -> None:
    bodies = [{"input_ids": ids(20 + index, 60 + index), "sampling_params": sampling(10)} for index in range(3)]
    expected = [solo(server, body)[0] for body in bodies]
    found = answers(server.generate(input_ids=[body["input_ids"] for body in bodies], sampling_params=sampling(10)))
    for answer, reference in zip(found, expected, strict=True):
        reference.check(answer)


def test_sc_04_chunk_sizes_change_nothing(server: Server, serve: Callable[..., Server]) -> None:
    body = {"input_ids": ids(300, 15), "sampling_params": sampling(24)}
    expected = solo(server, body)[0]
    for size in ("16", "64", "-1"):
        chunked = serve("--chunked-prefill-size", size, "--threads", "1")
        for _ in range(2):
            expected.check(chunked.generate(**body))
        chunked.settled()
        chunked.flush()
        assert chunked.pages()["free"] * 16 == chunked.metric("max_total_num_tokens")


@pytest.mark.full
def test_is_06_first_token_time_tells_nothing_about_other_tenants(serve: Callable[..., Server]) -> None:
    """30 paired first-token times. The control, a tenant's own warm prompt, shows that a hit would be seen."""
    server = serve(*LARGE)
    times: dict[str, list[float]] = {"cold": [], "foreign": [], "own": []}

    def ask(prompt: list[int], salt: str) -> float:
        began = time.perf_counter()
        server.generate(input_ids=prompt, sampling_params=sampling(1), cache_salt=salt)
        return time.perf_counter() - began

    for turn in range(30):
        prompt = ids(900, 2000 + turn)
        ask(prompt, "victim")
        pair = [("foreign", prompt), ("cold", ids(900, 3000 + turn))]
        for name, each in pair if turn % 2 else reversed(pair):
            times[name].append(ask(each, "attacker"))
        times["own"].append(ask(prompt, "victim"))
    cold, foreign, own = (statistics.median(times[name]) for name in ("cold", "foreign", "own"))
    assert own < 0.7 * cold, f"medians in seconds: own {own}, cold {cold}: this test could not see a hit"
    assert 0.8 < foreign / cold < 1.25, f"medians in seconds: foreign {foreign}, cold {cold}"
