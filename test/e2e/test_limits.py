"""Field reports as tests: validation, sampling, streaming, log-probabilities, aborts, overload, security, chat templates.

Each test names the case it stands for. All talk HTTP to a real server on a tiny model; "alive" means that it still answers afterwards.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.servers import ASCII_BIAS, Server, tiny_chat_model, together, until

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
SECRET = "sk-very-secret-K"
PACKAGE = Path(__file__).parents[2] / "radixpd"


STRICT = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system messages, please') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def odd(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server that streams seven tokens a chunk and whose chat template refuses system messages."""
    path = tmp_path_factory.mktemp("template") / "strict.jinja"
    path.write_text(STRICT)
    return serve("--chat-template", str(path), "--stream-interval", "7", "--threads", "1")


def body_for(route: str, **sampling: Any) -> dict[str, Any]:
    """A valid body of a route with these sampling fields under their native names."""
    if route == "/generate":
        return {"text": "hello", "sampling_params": {"max_new_tokens": 4, **sampling}}
    if "max_new_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    base = CHAT if route == "/v1/chat/completions" else {"prompt": "hello"}
    return {"model": "tiny", **base, "max_tokens": 4, **sampling}


def text_of(server: Server, **sampling: Any) -> str:
    """The text of one short prompt."""
    return str(server.generate(text="once upon", sampling_params={"ignore_eos": True, "max_new_tokens": 32, **sampling})["text"])


def refused(server: Server, route: str, body: dict[str, Any], *words: str) -> dict[str, Any]:
    """The error of a request that must be refused with 4xx; `words` must stand in its message."""
    answer = server.post(route, body)
    assert 400 <= answer.status < 500, (route, body, answer.status, answer.body[:300])
    assert answer.headers["Content-Type"].startswith("application/json")
    error: dict[str, Any] = answer.json["error"]
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]
    for word in words:
        assert word in error["message"]
    return error


@pytest.fixture(autouse=True)
def alive(server: Server) -> Iterator[None]:
    """Whatever a test did to the shared server: it answers, and nothing is left running."""
    yield
    assert server.generate(text="alive?", sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] <= 1
    server.settled()


# ---- validation -------------------------------------------------------------------------------------------------------------------


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
    for field, value in {"functions": [{"name": "f"}], "suffix": "s", "guided_json": {}, "json_schema": "{}", "regex": "a+"}.items():
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
        "bootstrap_room",
        "bootstrap_host",
        "input_embeds",
        "return_hidden_states",
        "custom_logit_processor",
    ],
)
def test_va_03_fields_of_later_features_are_refused_by_name(server: Server, field: str) -> None:
    error = refused(server, "/generate", {**body_for("/generate"), field: {"some": "thing"}}, field)
    assert error["code"] == "unsupported_field"
    assert server.post("/generate", {**body_for("/generate"), field: None}).status == 200


@pytest.mark.parametrize("field", ["json_schema", "regex", "ebnf", "structural_tag", "stop_regex"])
def test_va_03_grammars_are_refused_by_name(server: Server, field: str) -> None:
    refused(server, "/generate", body_for("/generate", **{field: "a+"}), field)


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


def raw_post(server: Server, route: str, raw: bytes) -> bytes:
    """The beginning of the answer to a body that need not be JSON."""
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head.encode() + raw)
        return connection.recv(4096)


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


# ---- sampling ---------------------------------------------------------------------------------------------------------------------


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


# ---- streaming and finish reasons -------------------------------------------------------------------------------------------------


def letters(server: Server, **sampling: Any) -> dict[str, Any]:
    """A greedy answer of printable ASCII, one character a token."""
    wish = {**GREEDY, "max_new_tokens": 40, "logit_bias": ASCII_BIAS, **sampling}
    return server.generate(text="letters", sampling_params=wish)  # type: ignore[no-any-return]


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


# ---- log-probabilities ------------------------------------------------------------------------------------------------------------


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


# ---- aborts, disconnects, overload, health ----------------------------------------------------------------------------------------


def test_ab_01_a_queued_request_can_be_aborted(serve: Callable[..., Server]) -> None:
    narrow = serve("--max-running-requests", "1", "--max-queued-requests", "4", "--threads", "1")
    long = narrow.stream("/generate", {"text": "long", "rid": "long", "sampling_params": {**GREEDY, "max_new_tokens": 3000}})
    next(long)

    def abort_when_queued() -> float:
        until(lambda: narrow.metric("num_queue_reqs") == 1, "the second one waits")
        narrow.post("/abort_request", {"rid": "second"})
        return time.monotonic()

    def second() -> tuple[Any, float]:
        return narrow.generate(text="second", rid="second", sampling_params={"max_new_tokens": 10}), time.monotonic()

    (answer, ended), aborted = together([second, abort_when_queued])
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert ended - aborted < 2
    assert narrow.metric("num_running_reqs") == 1
    narrow.post("/abort_request", {"rid": "long"})
    assert list(long)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(narrow.generate(text="third", sampling_params={**GREEDY, "max_new_tokens": 5})["output_ids"]) == 5
    narrow.settled()


def test_ab_01_abort_all(server: Server) -> None:
    streams = [server.stream("/generate", {"text": f"all {i}", "sampling_params": {**GREEDY, "max_new_tokens": 1500}}) for i in range(2)]
    for stream in streams:
        next(stream)
    assert server.post("/abort_request", {"abort_all": True}).json["aborted"] == 2
    assert [list(stream)[-1]["meta_info"]["finish_reason"]["type"] for stream in streams] == ["abort", "abort"]
    refused(server, "/abort_request", {})


def raw_stream(server: Server, tokens: int) -> socket.socket:
    """A connection with a running stream, for a client that will vanish."""
    raw = json.dumps({"text": f"raw {tokens}", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": tokens}})
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.sendall(
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n{raw}".encode()
    )
    assert b"data: " in connection.recv(65536) + connection.recv(65536)
    return connection


def test_ab_02_hard_closes_end_only_their_own_requests(server: Server) -> None:
    expected = text_of(server, temperature=0, max_new_tokens=200)
    server.settled()
    aborted = server.metric("num_aborted_requests")
    gone = [raw_stream(server, 1000 + index) for index in range(3)]

    def hang_up() -> str:
        for connection in gone:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # RST, no goodbye
            connection.close()
        return expected

    kept = [lambda: text_of(server, temperature=0, max_new_tokens=200)] * 3
    assert together([*kept, hang_up]) == [expected] * 4
    server.settled()
    assert server.metric("num_aborted_requests") == aborted + 3


def test_ab_03_200_short_streams_at_once(server: Server) -> None:
    def one(index: int) -> Any:
        return list(server.stream("/generate", {"text": f"{index}", "sampling_params": {**GREEDY, "max_new_tokens": 8}}))[-1]

    found = together([lambda index=index: one(index) for index in range(200)])
    assert all(event["meta_info"]["finish_reason"] == {"type": "length", "length": 8} for event in found)


def test_ab_04_op_07_probes_leave_nothing_behind(server: Server) -> None:
    stream = server.stream("/generate", {"text": "busy", "sampling_params": {**GREEDY, "max_new_tokens": 2500}})
    next(stream)
    statuses = together([lambda: [server.get("/health").status for _ in range(10)]] * 50)
    assert {status for each in statuses for status in each} == {200}
    assert server.metric("num_running_reqs") + server.metric("num_queue_reqs") <= 1
    assert set(together([lambda: server.get("/health_generate").status] * 8)) == {200}
    assert list(stream)[-1]["meta_info"]["completion_tokens"] == 2500


def test_op_06_gauges_do_not_drift(server: Server) -> None:
    stream = server.stream("/generate", {"text": "one", "rid": "same", "sampling_params": {**GREEDY, "max_new_tokens": 600}})
    next(stream)
    assert refused(server, "/generate", {**body_for("/generate"), "rid": "same"})["code"] == "duplicate_rid"
    assert {server.post("/abort_request", {"rid": "same"}).status for _ in range(50)} == {200}
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    server.settled()
    assert server.metric("num_running_reqs") == server.metric("num_queue_reqs") == 0


def test_sc_05_a_full_queue_answers_503_at_once(serve: Callable[..., Server]) -> None:
    narrow = serve("--max-running-requests", "1", "--max-queued-requests", "4", "--threads", "1")

    def one() -> tuple[int, str | None]:
        answer = narrow.post("/generate", {"text": "many", "sampling_params": {**GREEDY, "max_new_tokens": 30}}, timeout=60)
        return answer.status, answer.headers.get("Retry-After")

    found = together([one] * 40)
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 5
    assert all(int(again or 0) >= 1 for status, again in found if status == 503)
    narrow.settled()


def test_sc_06_http_answers_while_the_longest_prompt_runs(server: Server) -> None:
    def during() -> float:
        until(lambda: server.metric("num_running_reqs") > 0, "the prompt runs")
        started = time.monotonic()
        assert server.get("/v1/models").status == 200
        return time.monotonic() - started

    ids = [3 + (i * i) % 250 for i in range(4000)]
    _, seconds = together([lambda: server.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 90}), during])
    assert seconds < 1


# ---- security ---------------------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def processes(server: Server) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (server.process.pid, *server.children().values())]


def test_se_01_bombs_and_noise_do_nothing(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(trace)))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZMTP, as a ZMQ peer starts
    for port in {c.laddr.port for process in processes(server) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}:
        for payload in (bomb, os.urandom(4096), greeting + bomb, b"GET " + b"x" * 100_000):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(10)
                try:
                    while connection.recv(65536):
                        pass
                except ConnectionError:
                    continue
    refused(server, "/generate", {"text": "a", "custom_logit_processor": bomb.hex()})
    assert not trace.exists()


def test_se_01_no_pickle_in_the_source() -> None:
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|cPickle|dill|cloudpickle|marshal|shelve)\b|\b(recv|send)_pyobj\b|torch\.load\b", re.MULTILINE
    )
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    assert [str(file) for file in files if forbidden.search(file.read_text())] == []


def test_se_02_listeners_are_loopback_and_sockets_are_private(server: Server) -> None:
    listeners = [
        c
        for process in processes(server)
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM
    ]
    assert {(c.laddr.ip, c.laddr.port) for c in listeners} == {("127.0.0.1", server.port)}
    paths = {
        Path(c.laddr) for process in processes(server) for c in process.net_connections("unix") if c.laddr and c.status == psutil.CONN_NONE
    }
    bound = {path for path in paths if path.is_socket()}
    assert len(bound) >= 3
    for path in bound:
        assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.fixture(scope="module")
def locked(serve: Callable[..., Server]) -> Server:
    """A server with an API key."""
    return serve("--api-key", SECRET, "--threads", "1", "--log-level", "debug", "--log-requests")


def routes() -> list[tuple[str, str]]:
    """Method and path of every route, as the application registers them."""
    source = (PACKAGE / "server" / "app.py").read_text()
    found = re.findall(r'web\.(get|post|put|delete|patch)\("([^"]+)"', source)
    assert len(found) >= 15
    return [(method.upper(), re.sub(r"\{[^}]*\}", "x", path)) for method, path in found]


def test_se_03_every_route_needs_the_key(locked: Server) -> None:
    for method, path in [*routes(), ("GET", "/"), ("GET", "/unknown"), ("POST", "/health_generate"), ("GET", "/health/")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": SECRET}, {"Authorization": f"Basic {SECRET}"}):
            answer = locked.request(method, path, {} if method != "GET" else None, headers=headers)
            if path == "/health":
                assert answer.status == 200
            else:
                assert answer.status == 401, (method, path)
                assert answer.json["error"]["code"] == "invalid_api_key"
    good = {"Authorization": f"Bearer {SECRET}"}
    assert locked.post("/generate", body_for("/generate"), headers=good).status == 200
    assert locked.get("/v1/models", headers=good).status == 200


def test_se_04_secrets_are_never_shown(locked: Server) -> None:
    good = {"Authorization": f"Bearer {SECRET}"}
    locked.post("/generate", {**body_for("/generate"), "temperature": "bad"}, headers=good)
    shown = [locked.get(path, headers=good).body.decode() for path in ("/server_info", "/metrics", "/get_model_info", "/v1/models")]
    assert all(shown)
    assert not any(SECRET in text for text in [*shown, locked.log])
    for pid in locked.children().values():
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_se_08_huge_headers_are_refused(server: Server) -> None:
    for headers in ("".join(f"X-{i}: 1\r\n" for i in range(10_000)), "X: " + "y" * 2**20 + "\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            try:
                connection.sendall(f"GET /health HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
                answer = connection.recv(4096)
            except ConnectionError:
                continue
            assert answer == b"" or answer.split()[1] in (b"400", b"431")


def test_se_09_nothing_is_fetched(server: Server) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"}}
        refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
        with pytest.raises(BlockingIOError):
            listener.accept()


# ---- chat templates ---------------------------------------------------------------------------------------------------------------


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields})


def test_ct_01_a_template_may_refuse(odd: Server) -> None:
    answer = chat(odd, [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}])
    assert answer.status == 400
    assert "no system messages, please" in answer.json["error"]["message"]
    assert chat(odd, [{"role": "user", "content": "hi"}]).status == 200


@pytest.mark.parametrize("text", ["OK! ", "OK!\n", "OK!", " ", ""])
def test_ct_02_ct_03_any_message_can_be_continued_twice(server: Server, text: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    first, second = (chat(server, messages, continue_final_message=True, add_generation_prompt=False, echo=False) for _ in range(2))
    assert first.status == second.status == 200
    assert first.json["choices"] == second.json["choices"]
    # The prompt ends with exactly that text: as many byte tokens as it has, after the same head.
    empty = chat(server, [*messages[:1], {"role": "assistant", "content": ""}], continue_final_message=True).json["usage"]["prompt_tokens"]
    assert first.json["usage"]["prompt_tokens"] == empty + len(text)


def test_ct_04_a_model_without_template(tmp_path: Path) -> None:
    base = Server(tiny_chat_model(tmp_path, template=False), "--max-total-tokens", "1024", "--threads", "1")
    answer = chat(base, [{"role": "user", "content": "hi"}])
    assert answer.status == 400
    assert "--chat-template" in answer.json["error"]["message"]
    assert base.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status == 200
    assert base.close() == 0


def test_ct_05_a_last_message_by_the_assistant(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert chat(server, messages).status == 200
    refused(server, "/v1/chat/completions", {"messages": messages, "add_generation_prompt": True, "continue_final_message": True})
    refused(server, "/v1/chat/completions", {"messages": messages[:1], "continue_final_message": True})


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"role": "king", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        "hi",
        [[]],
    ],
)
def test_ct_messages_that_are_none(server: Server, messages: Any) -> None:
    refused(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
