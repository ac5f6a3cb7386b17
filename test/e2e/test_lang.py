"""The frontend language against a real server: what it scores, what it shares, and that every way to the model gives the same variables."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import radixpd_lang as rx
from e2e.servers import ASCII_BIAS, Server, until
from examples import few_shot_batch, json_extraction, judge, multi_turn_chat, rag, self_consistency, tree_of_thought

from benchmark.bench_programs import ProgramOptions, measure

SECONDS = 120.0  # for any one program: the machine may be busy
GREEDY = {"temperature": 0, "logit_bias": ASCII_BIAS, "ignore_eos": True}


@pytest.fixture(scope="module")
def endpoint(server: Server) -> rx.RuntimeEndpoint:
    return rx.RuntimeEndpoint(server.url, timeout=SECONDS)


def run(body: Callable[..., Any], backend: rx.Backend, **keywords: Any) -> rx.ProgramState:
    return rx.function(body).run(backend=backend, timeout=SECONDS, **keywords)


def fresh(length: int) -> str:
    """A text of so many characters (tokens of the tiny model) that no cache has seen."""
    return "".join(uuid.uuid4().hex for _ in range(-(-length // 32)))[:length]


def echoed(server: Server, text: str, start: int) -> list[float]:
    """Log-probabilities of the characters of `text` from `start` on, by the other API."""
    body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    return list(answer.json["choices"][0]["logprobs"]["token_logprobs"][start:])


@pytest.mark.parametrize(
    ("choices", "common"), [(["Paris", "London", "a third one"], 0), (["in Rome", "in Oslo"], 3), (["yes", "yes, but"], 0), (["alone"], 0)]
)
def test_fe_01_select_scores_what_the_echo_says(server: Server, endpoint: rx.RuntimeEndpoint, choices: list[str], common: int) -> None:
    text = fresh(70) + " The answer is: "
    state = run(lambda s: s.__iadd__(text + rx.select("choice", choices)), endpoint)
    reference = [echoed(server, text + choice, len(text) + common) for choice in choices]
    meta = state.get_meta_info("choice")
    assert [len(row) for row in meta["input_token_logprobs"]] == [len(choice) - common for choice in choices]
    for ours, theirs in zip(meta["input_token_logprobs"], reference, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    means = [sum(row) / len(row) for row in reference]
    assert state["choice"] == choices[means.index(max(means))]


def test_fe_02_methods_disagree_on_a_real_model(endpoint: rx.RuntimeEndpoint) -> None:
    """Each method's winner is the one that its documented figure gives, from the same scores."""

    def body(s: rx.ProgramState) -> None:
        s += "Some prompt: "
        for method in rx.ChoicesMethod:
            with s.copy() as scored:
                scored += rx.select(method.name, ["aaaa", "b", "zzz zzz", "{]"], choices_method=method)
                s.set_var(method.name, scored.get_meta_info(method.name))

    state = run(body, endpoint)
    metas = [state[method.name] for method in rx.ChoicesMethod]
    assert metas[0]["input_token_logprobs"] == metas[1]["input_token_logprobs"] == metas[2]["input_token_logprobs"]
    first = [row[0] for row in metas[1]["input_token_logprobs"]]
    assert metas[1]["normalized_prompt_logprobs"][first.index(max(first))] > float("-inf")
    assert metas[0]["normalized_prompt_logprobs"] != metas[2]["normalized_prompt_logprobs"]


def test_fe_03_a_space_before_or_after_the_border(endpoint: rx.RuntimeEndpoint) -> None:
    words = ["red", "green and blue", "x"]

    def body(s: rx.ProgramState, space_in_choices: bool) -> None:
        s += rx.user("Which colour?")
        choices = [f" {word}" for word in words] if space_in_choices else words
        s += rx.assistant(("It is" if space_in_choices else "It is ") + rx.select("colour", choices))

    without, within = [run(body, endpoint, space_in_choices=each) for each in (False, True)]
    assert within["colour"].strip() == without["colour"]
    rows, others = [state.get_meta_info("colour")["input_token_logprobs"] for state in (without, within)]
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, abs=1e-3)


def test_fe_04_branches_find_their_common_prefix_in_the_cache(server: Server, endpoint: rx.RuntimeEndpoint) -> None:
    def body(s: rx.ProgramState) -> None:
        s += fresh(200)
        forks = s.fork(8)
        forks += [f"{index} " + rx.gen("x", max_tokens=2) for index in range(8)]
        s.set_var("cached", [fork.get_meta_info("x")["cached_tokens"] for fork in forks])

    page = endpoint.get_server_info()["page_size"]
    assert min(run(body, endpoint)["cached"]) >= 200 - page


def test_a_batch_finds_its_constant_prefix_in_the_cache(endpoint: rx.RuntimeEndpoint) -> None:
    shots = fresh(300)

    @rx.function
    def program(s: rx.ProgramState, question: str) -> None:
        s += shots + question + rx.gen("answer", max_tokens=2)

    states = program.run_batch([{"question": f"{index}?"} for index in range(6)], backend=endpoint, timeout=SECONDS)
    assert min(state.get_meta_info("answer")["cached_tokens"] for state in states) >= 300 - endpoint.get_server_info()["page_size"]


def conversation(s: rx.ProgramState) -> None:
    s += rx.system("Be brief.")
    s += rx.user("What is the capital of France?")
    s += rx.assistant(rx.gen("one", max_tokens=12))
    s += rx.user("And of Italy?")
    s += rx.assistant("It is " + rx.gen("two", max_tokens=12))
    s += rx.user("Sure?")
    s += rx.assistant(rx.gen("three", max_tokens=6, stop=["Q", "z"]))


def plain(s: rx.ProgramState) -> None:
    s += "1, 2, 3," + rx.gen("one", max_tokens=8) + ", and then" + rx.gen("two", max_tokens=8)
    s += "; a letter: " + rx.select("letter", ["A", "B", "CC"])


def variables(state: rx.ProgramState, names: str) -> list[Any]:
    return [state[name] for name in names.split()]


def test_every_way_to_the_model_gives_the_same_variables(server: Server, endpoint: rx.RuntimeEndpoint) -> None:
    chat = rx.OpenAI("default", base_url=f"{server.url}/v1", continue_final_message=True, timeout=SECONDS)
    completions = rx.OpenAI("default", base_url=f"{server.url}/v1", is_chat_model=False, timeout=SECONDS)
    native = [run(body, endpoint, **GREEDY) for body in (conversation, plain)]
    assert variables(run(conversation, chat, **GREEDY), "one two three") == variables(native[0], "one two three")
    assert variables(run(plain, completions, **GREEDY), "one two letter") == variables(native[1], "one two letter")
    for body, other, names, whole in ((conversation, chat, "one two three", native[0]), (plain, completions, "one two", native[1])):
        for backend in (endpoint, other):
            streamed = run(body, backend, stream=True, **GREEDY)
            text = "".join(streamed.text_iter())
            assert text == streamed.text()
            assert variables(streamed, names) == variables(whole, names)


def test_a_conversations_prompt_is_that_of_the_chat_route(server: Server, endpoint: rx.RuntimeEndpoint) -> None:
    state = run(conversation, endpoint, **GREEDY)
    messages = state.messages()
    for name, last in (("one", 2), ("three", 6)):
        answer = server.post("/v1/chat/completions", {"messages": messages[:last], "max_tokens": 1, "temperature": 0})
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["prompt_tokens"] == state.get_meta_info(name)["prompt_tokens"]


def test_a_strict_template_refuses_and_the_program_says_where(odd: Server) -> None:
    with pytest.raises(rx.ProgramError, match=r"test_lang.py:\d+: gen 'one': .*no system messages, please"):
        run(conversation, rx.RuntimeEndpoint(odd.url, timeout=SECONDS))


def test_streams_of_a_server_that_sends_seven_tokens_a_chunk(odd: Server) -> None:
    def body(s: rx.ProgramState) -> None:
        s += "Count: " + rx.gen("x", max_tokens=30)

    backend = rx.RuntimeEndpoint(odd.url, timeout=SECONDS)
    state = run(body, backend, stream=True, **GREEDY)
    pieces = list(state.text_iter("x"))
    assert len(pieces) > 1
    assert "".join(pieces) == run(body, backend, **GREEDY)["x"]


@pytest.mark.usefixtures("alive")
def test_a_cancelled_program_leaves_nothing_running(server: Server, endpoint: rx.RuntimeEndpoint) -> None:
    def body(s: rx.ProgramState) -> None:
        forks = s.fork(3)
        forks += [f"{index}: " + rx.gen("x", max_tokens=1000) for index in range(3)]
        forks.join()

    state = run(body, endpoint, stream=True, **GREEDY)
    until(lambda: server.server_info()["internal_states"][0]["requests"], "requests run")
    state.cancel()
    with pytest.raises(rx.ProgramCancelled):
        list(state.text_iter())
    server.settled()


@pytest.mark.usefixtures("alive")
def test_a_wrong_argument_ends_its_program_with_the_servers_words(endpoint: rx.RuntimeEndpoint) -> None:
    def body(s: rx.ProgramState, heat: float) -> None:
        s += "x" + rx.gen("x", temperature=heat, max_tokens=1)

    with pytest.raises(rx.ProgramError, match=r"gen 'x': temperature must be between 0 and 100, got -1.0 \(/generate, 400\)") as raised:
        run(body, endpoint, heat=-1.0)
    assert raised.value.place.file == __file__
    with pytest.warns(UserWarning, match="1 of the programs failed"):
        states = rx.function(body).run_batch([{"heat": 0.0}, {"heat": -1.0}, {"heat": 1.0}], backend=endpoint, timeout=SECONDS)
    assert [state.error() is None for state in states] == [True, False, True]


def test_many_programs_against_a_server_that_takes_few(serve: Callable[..., Server]) -> None:
    small = serve("--max-running-requests", "2", "--max-queued-requests", "2")

    @rx.function
    def program(s: rx.ProgramState, n: int) -> None:
        s += f"{n}: " + rx.gen("x", max_tokens=4)

    states = program.run_batch([{"n": n} for n in range(12)], backend=rx.RuntimeEndpoint(small.url, timeout=SECONDS), timeout=SECONDS)
    assert [state.error() for state in states] == [None] * 12


@pytest.mark.parametrize("example", [few_shot_batch, judge, multi_turn_chat, rag, self_consistency, tree_of_thought])
def test_an_example_runs_with_and_without_hints(example: Any, server: Server, endpoint: rx.RuntimeEndpoint) -> None:
    size = 2 if example in (few_shot_batch, rag) else 1
    with_hints = example.run(endpoint, size=size)
    assert len(with_hints) == size
    assert example.run(endpoint, size=size, hints=False) == with_hints
    server.settled()


def test_json_extraction(endpoint: rx.RuntimeEndpoint) -> None:
    found = json_extraction.run(endpoint, size=2)
    assert len(found) == 2
    for person in found:
        assert re.fullmatch(json_extraction.PHONE, person.pop("phone"))
        assert {name: type(value) for name, value in person.items()} == {"name": str, "born": int, "alive": bool}


def test_grammars_and_types_of_a_real_server(endpoint: rx.RuntimeEndpoint) -> None:
    def body(s: rx.ProgramState) -> None:
        s += "int " + rx.gen_int("i", max_tokens=20) + " float " + rx.gen("f", dtype=float, max_tokens=40)
        s += " bool " + rx.gen("b", dtype=bool) + " text " + rx.gen("t", regex="[ab]{3}") + rx.gen("e", ebnf='root ::= "x" "y"')

    state = run(body, endpoint, seed=5)
    assert [type(state[name]) for name in "ifb"] == [int, float, bool]
    assert re.fullmatch("[ab]{3}", state["t"])
    assert state["e"] == "xy"


def test_hints_find_what_an_ideal_cache_would(server: Server) -> None:
    """Byte tokens make pages of sixteen characters, far finer than a real model's."""
    for name in ("few_shot_batch", "self_consistency"):
        hinted, answers = measure(server.url, name, 2, True, ProgramOptions())
        plain, same = measure(server.url, name, 2, False, ProgramOptions())
        assert answers == same
        assert (hinted["requests"], plain["hints"]) == (plain["requests"], 0)
        assert hinted["share_of_optimum"] >= 0.96
        assert hinted["computed_tokens"] <= 1.1 * plain["computed_tokens"]
