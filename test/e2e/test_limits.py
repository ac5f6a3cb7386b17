"""What the door refuses and what the sampler obeys.

Each test names the case of the project's list of field reports that it stands for; the default server must be alive after each.
"""

from __future__ import annotations

from typing import Any

import pytest
from e2e.asks import GREEDY, ROUTES, body_for, raw_post, refused, text_of
from e2e.servers import Server, together

pytestmark = pytest.mark.usefixtures("alive")


@pytest.mark.parametrize("route", ROUTES)
def test_va_01_over_the_context_has_one_code_and_both_numbers(server: Server, route: str) -> None:
    error = refused(server, route, body_for(route, max_new_tokens=10**7), "4096", "10000")
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in ("max_new_tokens", "max_tokens")
    long = "x" * 5000
    body = {"text": long} if route == "/generate" else {"prompt": long} if route == "/v1/completions" else {}
    if not body:
        body = {"messages": [{"role": "user", "content": long}]}
    assert refused(server, route, body, "4096")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/generate", {"return_logprob": True, "top_logprobs_num": 10**9}),
        ("/generate", {"return_logprob": True, "top_logprobs_num": -1}),
        ("/v1/completions", {"logprobs": 10**6}),
        ("/v1/completions", {"logprobs": -1}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 10**6}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}),
        ("/v1/chat/completions", {"top_logprobs": 3}),
    ],
)
def test_va_02_logprob_counts_are_capped(server: Server, route: str, fields: dict[str, Any]) -> None:
    refused(server, route, {**body_for(route), **fields}, "logprobs")


@pytest.mark.parametrize("route", ROUTES[1:])
def test_va_03_openai_fields_act_or_are_refused(server: Server, route: str) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert server.post(route, {**body_for(route), **harmless}).status == 200
    found = server.post(route, {**body_for(route, temperature=1), "n": 3, "seed": 1})
    assert [choice["index"] for choice in found.json["choices"]] == [0, 1, 2]
    for field, value in {"response_format": {"type": "banana"}, "tools": [{"type": "function"}], "tool_choice": "required"}.items():
        if route == "/v1/chat/completions":
            refused(server, route, {**body_for(route), field: value}, field if field != "tools" else "tools")
    for field, value in {"functions": [{"name": "f"}], "suffix": "s", "guided_json": {"a": 1}, "json_schema": "{", "regex": "a("}.items():
        if value and not (field == "suffix" and route == "/v1/chat/completions"):
            refused(server, route, {**body_for(route), field: value}, field)


def test_va_03_best_of_and_echo_act(server: Server) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 1, "seed": 3}
    answer = server.post("/v1/completions", {**body, "best_of": 4, "n": 2, "logprobs": 0})
    means = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer.json["choices"]]
    assert len(means) == 2
    assert means[0] >= means[1]
    assert server.post("/v1/completions", {**body, "echo": True}).json["choices"][0]["text"].startswith("hello")


@pytest.mark.parametrize(
    "field",
    [
        "lora_path",
        "session_params",
        "image_data",
        "kv_transfer_params",
        "disagg_prefill_dp_rank",
        "input_embeds",
        "return_hidden_states",
        "custom_logit_processor",
    ],
)
def test_va_03_fields_of_later_features_are_refused_by_name(server: Server, field: str) -> None:
    error = refused(server, "/generate", {**body_for("/generate"), field: {"some": "thing"}}, field)
    assert error["code"] == "unsupported_field"
    assert server.post("/generate", {**body_for("/generate"), field: None}).status == 200


@pytest.mark.parametrize("route", ROUTES)
def test_va_04_lists_are_capped(server: Server, route: str) -> None:
    refused(server, route, body_for(route, stop=["x"] * 10_000), "stop")
    refused(server, route, body_for(route, stop=["x" * 10**6]), "stop")
    refused(server, route, body_for(route, stop_token_ids=[3] * 10_000), "stop_token_ids")
    refused(server, route, body_for(route, logit_bias={str(index): 1 for index in range(10_000)}), "logit_bias")
    refused(server, route, body_for(route, stop=""), "stop")
    refused(server, route, body_for(route, stop=["a", ""]), "stop")


@pytest.mark.parametrize("route", ROUTES)
def test_va_05_max_tokens_negative_or_missing(server: Server, route: str) -> None:
    refused(server, route, body_for(route, max_new_tokens=-5), "max_")
    body = body_for(route, ignore_eos=True)
    body.get("sampling_params", body).pop("max_new_tokens" if route == "/generate" else "max_tokens")
    if route == "/v1/chat/completions":
        body["stop_token_ids"] = list(range(3, 130))  # or it would fill the context
    answer = server.post(route, body).json
    count = answer["meta_info"]["completion_tokens"] if route == "/generate" else answer["usage"]["completion_tokens"]
    assert count <= {"/generate": 128, "/v1/completions": 16}.get(route, 4096)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 999999), ("temperature", -1), ("temperature", "hot"), ("repetition_penalty", 0), ("repetition_penalty", 1e9),
        ("frequency_penalty", 3), ("presence_penalty", -3), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("n", 0),
        ("n", 10**6), ("seed", 2**80), ("min_tokens", -1), ("logit_bias", {"5": 1e9}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"999999": 1}),
        ("stop_token_ids", [10**9]), ("stop_token_ids", [-1]), ("max_new_tokens", 1.5), ("n", True),
    ],
)  # fmt: skip
def test_va_07_numbers_have_closed_ranges(server: Server, route: str, field: str, value: Any) -> None:
    if field == "min_tokens" and route == "/generate":
        field = "min_new_tokens"
    error = refused(server, route, body_for(route, **{field: value}))
    assert field.removeprefix("max_new_") in error["message"] or field in str(error["param"])


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999", b"-1e999"])
def test_va_07_no_infinities(server: Server, number: bytes) -> None:
    raw = b'{"text": "a", "sampling_params": {"temperature": %b}}'
    assert raw_post(server, "/generate", raw % b"0.5").startswith(b"HTTP/1.1 200")
    assert raw_post(server, "/generate", raw % number).startswith(b"HTTP/1.1 4")


BROKEN = [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"text": 1}', b'{"prompt": [[]]}', b"{}"]


@pytest.mark.parametrize("route", ROUTES)
def test_va_bodies_that_are_no_request(server: Server, route: str) -> None:
    for raw in BROKEN:
        assert raw_post(server, route, raw).startswith(b"HTTP/1.1 4"), raw[:20]


@pytest.mark.parametrize("ids", [[], [-1], [10**9], [259], [1.5], ["a"], [[]], [[1], []], [True]])
def test_va_prompt_ids_outside_the_vocabulary(server: Server, ids: Any) -> None:
    refused(server, "/generate", {"input_ids": ids})
    refused(server, "/v1/completions", {"prompt": ids} if ids != ["a"] else {"prompt": [["a"]]})


def test_sa_01_greedy_ignores_every_filter(server: Server) -> None:
    plain = text_of(server, temperature=0)
    assert text_of(server, temperature=0, top_p=0.1, top_k=40, min_p=0.9) == plain
    assert text_of(server, temperature=1.7, top_k=1) == plain


def test_sa_02_repetition_penalty_acts(server: Server) -> None:
    def repeats(penalty: float) -> int:
        ids = server.generate(text="abab" * 8, sampling_params={**GREEDY, "max_new_tokens": 60, "repetition_penalty": penalty})[
            "output_ids"
        ]
        return 60 - len(set(ids))

    assert repeats(1.8) < repeats(1.0)


def test_sa_03_frequency_and_presence_penalty_act(server: Server) -> None:
    # A bias that makes one id win, yet weakly enough for a penalty to matter.
    for field in ("frequency_penalty", "presence_penalty"):
        counts = [
            server.generate(text="x", sampling_params={**GREEDY, "max_new_tokens": 40, "logit_bias": {"40": 5}, field: value})[
                "output_ids"
            ].count(40)
            for value in (0, 2)
        ]
        assert counts[1] < counts[0], field


def test_sa_04_seedless_samples_differ(server: Server) -> None:
    sampling = {"temperature": 1.5, "ignore_eos": True, "max_new_tokens": 16}
    alone = together([lambda: server.generate(text="same", sampling_params=sampling)["text"]] * 6)
    assert len(set(alone)) >= 2
    assert len({answer["text"] for answer in server.generate(text="same", sampling_params={**sampling, "n": 6})}) >= 2


def test_sa_04_seeded_requests_repeat(server: Server) -> None:
    bodies = [{"temperature": 1.5, "sampling_seed": 5}, {"temperature": 1.5, "seed": 5}] * 3
    assert len(set(together([lambda body=body: text_of(server, **body) for body in bodies]))) == 1
    assert text_of(server, temperature=1.5, seed=6) != text_of(server, temperature=1.5, seed=5)


def test_sa_05_defaults_are_neutral(server: Server) -> None:
    assert len({text_of(server, temperature=2) for _ in range(6)}) >= 2


def test_sa_06_min_p_1_is_greedy(server: Server) -> None:
    assert text_of(server, temperature=2, min_p=1.0) == text_of(server, temperature=0)
