"""Constrained output on real servers: the tiny random model writes what its grammar allows, whatever else is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from e2e.pd import Pair
from e2e.servers import Server, together
from grammar.schema_pairs import PAIRS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
CHAT = [{"role": "user", "content": "a person"}]


def ask(server: Server, *, prompt: str = "give me", tokens: int = 120, **sampling: Any) -> Any:
    """A native answer."""
    sampling = {"temperature": 1.5, "max_new_tokens": tokens, "sampling_seed": 1, **sampling}
    return server.generate(text=prompt, sampling_params=sampling)


def kind(answer: Any) -> str:
    found: str = answer["meta_info"]["finish_reason"]["type"]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_so_01_the_end_comes_only_behind_a_whole_document(server: Server, seed: int) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 20}}, "required": ["text"]}
    answer = ask(server, json_schema=json.dumps(schema), sampling_seed=seed)
    assert kind(answer) == "stop"
    jsonschema.validate(json.loads(answer["text"]), schema)


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_new_tokens": 40}], ids=str)
def test_so_02_behind_the_document_there_is_nothing(server: Server, more: dict[str, Any]) -> None:
    answer = ask(server, json_schema={"enum": ["only this"]}, **more)
    assert (answer["text"], kind(answer)) == ('"only this"', "stop")
    assert answer["meta_info"]["completion_tokens"] == len('"only this"') + 1


def test_so_03_escapes_in_a_schema_are_characters(server: Server) -> None:
    for text in ('{"enum": ["caf\\u00e9 \\u65e5"]}', '{"enum": ["café 日"]}'):
        assert json.loads(ask(server, json_schema=text)["text"]) == "café 日"


def test_so_05_a_document_cut_short_says_so(server: Server) -> None:
    answer = ask(server, json_schema=PERSON, tokens=5)
    assert kind(answer) == "length"
    assert answer["text"].startswith('{"nam')


def test_so_06_a_property_that_is_only_required_is_there(server: Server) -> None:
    answer = ask(server, json_schema={"type": "object", "required": ["a"]}, sampling_seed=4, tokens=300)
    if kind(answer) == "stop":
        assert "a" in json.loads(answer["text"])
    assert answer["text"].startswith('{"a": ')
    error = server.post("/generate", {"text": "a", "sampling_params": {"json_schema": {"uniqueItems": True}}})
    assert error.status == 400
    assert "uniqueItems" in error.json["error"]["message"]


def test_so_07_an_unknown_format_is_refused(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "banana"}})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "response_format"


@pytest.mark.full
def test_so_04_grammars_that_are_gone_take_no_memory(server: Server) -> None:
    def memory() -> int:
        status = Path(f"/proc/{server.children()['runner']}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def many(first: int, count: int) -> None:
        for start in range(first, first + count, 50):
            shapes = [
                {"type": "object", "properties": {f"p{at}": {"type": "string"}}, "required": [f"p{at}"]} for at in range(start, start + 50)
            ]
            together([partial(ask, server, json_schema=shape, tokens=2) for shape in shapes])

    many(0, 100)
    before = memory()
    many(100, 1900)
    assert memory() - before < 100 * 2**20


@pytest.mark.full
def test_so_08_slow_grammars_hold_nobody_up(server: Server) -> None:
    heavy = [f'root ::= (("a"{{0,{3000 + at}}} "b"{{0,3000}}){{0,3000}}){{0,3000}}' for at in range(8)]
    calls: list[Callable[[], Any]] = [partial(server.post, "/generate", {"text": "a", "sampling_params": {"ebnf": text}}) for text in heavy]
    *answers, (easy, free) = together([*calls, lambda: (ask(server, regex="easy", tokens=8), server.generate(text="a"))])
    assert easy["text"] == "easy"
    assert free["meta_info"]["completion_tokens"] > 0
    assert {answer.status for answer in answers} <= {200, 400}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_response_formats(server: Server, route: str) -> None:
    body: dict[str, Any] = {"prompt": "x"} if route == "/v1/completions" else {"messages": CHAT}
    body |= {"max_tokens": 150, "temperature": 1, "seed": 3}

    def text(**more: Any) -> str:
        answer = server.post(route, {**body, **more})
        assert answer.status == 200, answer.body
        choice = answer.json["choices"][0]
        assert choice["finish_reason"] == "stop"
        found: str = choice["text"] if route == "/v1/completions" else choice["message"]["content"]
        return found

    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    jsonschema.validate(json.loads(text(response_format=shape)), PERSON)
    assert text(regex="(yes|no), [0-9]{3}") in {f"{word}, {number:03}" for word in ("yes", "no") for number in range(1000)}
    assert text(ebnf='root ::= "a" b "c"\nb ::= "b" | "bb"') in ("abc", "abbc")


def test_a_grammar_that_cannot_be_read_is_a_400(server: Server) -> None:
    answer = server.post("/generate", {"text": "a", "sampling_params": {"ebnf": "root ::= nowhere"}})
    assert answer.status == 400
    assert "nowhere" in answer.json["error"]["message"]
    assert kind(ask(server, regex="ok")) == "stop"


def test_samples_logprobs_and_penalties_go_with_a_grammar(server: Server) -> None:
    sampling = {"json_schema": PERSON, "n": 3, "temperature": 1.2, "frequency_penalty": 1.5, "max_new_tokens": 150, "sampling_seed": 5}
    answers = server.generate(text="three", sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
    assert len(answers) == 3
    for answer in answers:
        assert kind(answer) == "stop"
        jsonschema.validate(json.loads(answer["text"]), PERSON)
        assert len(answer["meta_info"]["output_token_logprobs"]) == answer["meta_info"]["completion_tokens"]
    assert len({answer["text"] for answer in answers}) > 1


def test_constrained_and_free_requests_run_together(server: Server) -> None:
    free = {"text": "free", "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}}
    alone = server.generate(**free)["text"]
    calls: list[Callable[[], Any]] = [partial(ask, server, json_schema=PERSON, sampling_seed=seed) for seed in range(4)]
    results = together([*calls, *[lambda: server.generate(**free)] * 4])
    for answer in results[:4]:
        jsonschema.validate(json.loads(answer["text"]), PERSON)
    assert [answer["text"] for answer in results[4:]] == [alone] * 4


def test_a_retracted_request_goes_on_in_its_grammar(serve: Callable[..., Server]) -> None:
    server = serve("--max-total-tokens", "384", "--schedule-conservativeness", "0.05", "--page-size", "4")
    schema = {"type": "string", "minLength": 60, "maxLength": 60}
    alone = [ask(server, prompt=f"{seed}", json_schema=schema, sampling_seed=seed, tokens=280)["text"] for seed in range(6)]
    before = server.metric("num_retracted_requests")
    calls: list[Callable[[], Any]] = [
        partial(ask, server, prompt=f"{seed}", json_schema=schema, sampling_seed=seed, tokens=280) for seed in range(6)
    ]
    answers = together(calls)
    assert server.metric("num_retracted_requests") > before
    assert [answer["text"] for answer in answers] == alone


def test_structural_tags_leave_the_rest_free(server: Server) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": ["x"]}, "end": "</f>"}], "triggers": ["<f"]}
    bias = {str(3 + at): -100 for at in range(256) if chr(at + 33) not in "<f>x"}
    answer = ask(server, structural_tag=tag, logit_bias=bias, tokens=200, ignore_eos=True)
    for found in re.findall(r"<f.*", answer["text"]):
        assert found.startswith(('<f>"x"</f>'[: len(found)], '<f>"x"</f>'))


@pytest.fixture(scope="module")
def second(serve: Callable[..., Server]) -> Server:
    """A server with the other backend."""
    return serve("--grammar-backend", "llguidance")


def test_the_other_backend_writes_the_same(server: Server, second: Server) -> None:
    for seed in range(3):
        one, other = (ask(each, json_schema=PERSON, sampling_seed=seed) for each in (server, second))
        assert one["text"] == other["text"]
        jsonschema.validate(json.loads(one["text"]), PERSON)


def test_a_server_without_grammars_refuses_by_name(serve: Callable[..., Server]) -> None:
    answer = serve("--grammar-backend", "none").post("/generate", {"text": "a", "sampling_params": {"regex": "a"}})
    assert answer.status == 400
    assert "--grammar-backend none" in answer.json["error"]["message"]


def test_a_pair_of_servers_keeps_to_a_grammar(server: Server, pair: Callable[..., Pair]) -> None:
    both = pair()
    for seed in range(3):
        sampling = {"temperature": 1.5, "max_new_tokens": 120, "sampling_seed": seed, "json_schema": PERSON}
        alone = server.generate(text="a person, please, with name and age", sampling_params=sampling)
        handed = both.generate(text="a person, please, with name and age", sampling_params=sampling)
        jsonschema.validate(json.loads(handed["text"]), PERSON)
        assert handed["text"] == alone["text"]


def test_jumping_changes_the_number_of_steps_alone(server: Server, serve: Callable[..., Server]) -> None:
    fixed = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in ("first_number", "second_number", "the_last_one")},
        "required": ["first_number", "second_number", "the_last_one"],
    }
    slow = serve("--disable-jump-forward")
    steps = {}
    for each in (server, slow):
        before = each.metric("num_steps")
        answers = [ask(each, json_schema=fixed, sampling_seed=seed, frequency_penalty=0.5)["text"] for seed in range(4)]
        steps[each] = each.metric("num_steps") - before, answers
    assert steps[server][1] == steps[slow][1]
    assert steps[slow][0] >= 1.5 * steps[server][0]
    jsonschema.validate(json.loads(steps[server][1][0]), fixed)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_schema_yields_documents_and_nothing_else(server: Server) -> None:
    for schema, _, _ in PAIRS:
        # The tiny model never ends a text by itself: what closes something is made likelier.
        bias = {str(server.post("/tokenize", {"text": char, "add_special_tokens": False}).json["tokens"][0]): 4 for char in '"}],'}
        calls: list[Callable[[], Any]] = [
            partial(ask, server, json_schema=schema, sampling_seed=seed, temperature=1.0, tokens=300, logit_bias=bias) for seed in range(5)
        ]
        ended = [answer["text"] for answer in together(calls) if kind(answer) == "stop"]
        assert ended, schema
        for text in ended:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
