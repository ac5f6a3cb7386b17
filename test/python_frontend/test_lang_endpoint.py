"""What a radixpd server is asked, and what becomes of its answers: against a stub that answers as the real one does.

The stub's tokenizer has one token a character, so ids can be read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import radixpd_lang as rx
from gates import SECONDS
from radixpd_lang import loop
from stub_server import Events, Stub, serving

LONG = "A text that is long enough to be worth a hint, since it has more than sixty-four characters. "


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


def rendered(messages: list[dict[str, str]], generation: bool, continued: bool) -> str:
    assert not (generation and continued)
    turns = [f"<{message['role']}>{message['content'].strip()}</>" for message in messages]
    if continued:
        turns[-1] = f"<{messages[-1]['role']}>{messages[-1]['content']}"
    return "".join(turns) + ("<assistant>" if generation else "")


def tokenize(body: Any) -> Any:
    if "messages" in body:
        return {"tokens": ids(rendered(body["messages"], body["add_generation_prompt"], body.get("continue_final_message", False)))}
    return {"tokens": [ids("^" + text) for text in body["text"]]}


def generated(text: str, **meta: Any) -> dict[str, Any]:
    counts = {"completion_tokens": len(text), "finish_reason": {"type": "stop", "matched": None}}
    return {"text": text, "output_ids": ids(text), "meta_info": {**counts, **meta}}


def generate(body: Any) -> Any:
    if body.get("return_logprob") and "input_ids" in body:
        start = body["logprob_start_len"]
        # The later a letter in the alphabet, the less likely it is.
        return [
            {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": [[-float(token), token, None] for token in row[start:]]}}
            for row in body["input_ids"]
        ]
    return generated("out")


def stub(**answers: Any) -> Stub:
    known = {
        "/tokenize": tokenize,
        "/generate": generate,
        "/server_info": lambda body: {"page_size": 16},
        "/flush_cache": lambda body: {"success": True},
    }
    return Stub({**known, **{f"/{name}": answer for name, answer in answers.items()}})


def run(body: Any, url: str, **keywords: Any) -> rx.ProgramState:
    return rx.function(body).run(backend=rx.RuntimeEndpoint(url), timeout=SECONDS, **keywords)


def test_every_argument_arrives_under_the_servers_name() -> None:
    def body(s: rx.ProgramState) -> None:
        s += "text" + rx.gen(
            "x", 5, min_tokens=1, stop=("a", "b"), stop_regex="c+", stop_token_ids=[7], temperature=0.5, top_p=0.9, top_k=3, min_p=0.1,
            frequency_penalty=1.0, presence_penalty=-1.0, repetition_penalty=1.5, logit_bias={"3": -100}, ignore_eos=True,
            skip_special_tokens=False, no_stop_trim=True, seed=11, return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
            token_ids_logprob=[1], return_text_in_logprobs=True, json_schema={"type": "object"},
        )  # fmt: skip

    server = stub()
    with serving(server) as url:
        backend = rx.RuntimeEndpoint(url + "/", api_key="secret", extra_body={"cache_salt": "mine"})
        state = rx.function(body).run(backend=backend, timeout=SECONDS)
        assert backend.get_server_info() == {"page_size": 16}
        backend.flush_cache()
        backend.close()
    assert state["x"] == "out"
    assert state.get_meta_info("x")["output_ids"] == ids("out")
    assert server.bodies("/generate") == [
        {
            "text": "text",
            "sampling_params": {
                "max_new_tokens": 5, "min_new_tokens": 1, "stop": ["a", "b"], "stop_regex": "c+", "stop_token_ids": [7],
                "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "frequency_penalty": 1.0, "presence_penalty": -1.0,
                "repetition_penalty": 1.5, "logit_bias": {"3": -100}, "ignore_eos": True, "skip_special_tokens": False,
                "no_stop_trim": True, "sampling_seed": 11, "json_schema": '{"type": "object"}',
            },
            "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [1],
            "return_text_in_logprobs": True, "cache_salt": "mine",
        }
    ]  # fmt: skip
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
    assert "secret" not in repr(backend)


@pytest.mark.parametrize("grammar", [{"regex": "a+"}, {"ebnf": "root ::= x"}, {"structural_tag": "{}"}, {"dtype": int}])
def test_grammars_are_passed_through(grammar: Any) -> None:
    server = stub(generate=lambda body: generated("7"))
    with serving(server) as url:
        run(lambda s: s.__iadd__("x" + rx.gen("x", **grammar)), url)
    [body] = server.bodies("/generate")
    assert set(body["sampling_params"]) == ({"regex"} if "dtype" in grammar else set(grammar))


def test_n_and_its_metas() -> None:
    server = stub(generate=lambda body: [generated("a", id="r-0"), generated("b", id="r-1")])
    with serving(server) as url:
        state = run(lambda s: s.__iadd__("x" + rx.gen("x", n=2)), url)
    assert state["x"] == ["a", "b"]
    assert [meta["id"] for meta in state.get_meta_info("x")["samples"]] == ["r-0", "r-1"]


def prompts(server: Stub) -> list[str]:
    """Prompts of all requests for tokens, as text."""
    bodies = [body for body in server.bodies("/generate") if not body.get("return_logprob")]
    return [body["text"] if "text" in body else "".join(map(chr, body["input_ids"])) for body in bodies]


def test_conversations_go_through_the_servers_template() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.system(" Be brief. ")
        s += rx.user("Hi " + rx.gen("rest"))  # the model speaks for the user
        s += rx.assistant(rx.gen("one"))
        s += rx.user("And?")
        s += rx.assistant("Well, " + rx.gen("two"))

    server = stub()
    with serving(server) as url:
        state = run(body, url)
    assert prompts(server) == [
        "<system>Be brief.</><user>Hi ",
        "<system>Be brief.</><user>Hi out</><assistant>",
        "<system>Be brief.</><user>Hi out</><assistant>out</><user>And?</><assistant>Well, ",
    ]
    assert state.messages()[-1] == {"role": "assistant", "content": "Well, out"}


def test_branches_of_a_conversation_render_their_prefix_once() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.user(LONG)
        s.fork(4).__iadd__(rx.assistant(rx.gen("x")))

    server = stub()
    with serving(server) as url:
        run(body, url)
    assert prompts(server) == [f"<user>{LONG.strip()}</>"] + [f"<user>{LONG.strip()}</><assistant>"] * 4
    assert server.bodies("/generate")[0]["sampling_params"] == {"max_new_tokens": 0}
    assert len(server.bodies("/tokenize")) <= 1 + 4  # concurrent branches may ask before the first answer is there


@pytest.mark.parametrize(
    ("text", "choices", "start", "scored"),
    [
        ("pick ", ["ab", "cd"], 6, ["ab", "cd"]),
        ("pick ", ["xa", "xb"], 7, ["a", "b"]),
        ("pick", [" ab", " cd"], 6, ["ab", "cd"]),
        ("pick ", ["a", "ab"], 6, ["a", "ab"]),
    ],
)
def test_fe_01_exactly_the_tokens_of_the_choices_are_scored(text: str, choices: list[str], start: int, scored: list[str]) -> None:
    server = stub()
    with serving(server) as url:
        state = run(lambda s: s.__iadd__(text + rx.select("x", choices)), url)
    bodies = server.bodies("/generate")
    assert [row for body in bodies for row in body["input_ids"]] == [ids("^" + text + choice) for choice in choices]
    assert all((body["logprob_start_len"], body["sampling_params"]) == (start, {"max_new_tokens": 0}) for body in bodies)
    meta = state.get_meta_info("x")
    assert meta["choice_tokens"] == [ids(each) for each in scored]
    assert meta["input_token_logprobs"] == [[-float(token) for token in ids(each)] for each in scored]
    assert meta["normalized_prompt_logprobs"] == [-sum(ids(each)) / len(each) for each in scored]
    assert state["x"] == choices[0]


def test_fe_03_a_space_on_either_side_of_the_border_changes_nothing() -> None:
    words = ["bz", "c", "aaaaz"]
    with serving(stub()) as url:
        before = run(lambda s: s.__iadd__("Answer: " + rx.select("x", words)), url)
        after = run(lambda s: s.__iadd__("Answer:" + rx.select("x", [f" {word}" for word in words])), url)
    assert after["x"] == " " + before["x"]
    assert after.get_meta_info("x")["input_token_logprobs"] == before.get_meta_info("x")["input_token_logprobs"]


def test_choices_of_an_assistants_turn_are_scored_in_context() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.user("Is it?")
        s += rx.assistant(rx.select("x", ["yes", "no"], choices_method="unconditional_likelihood_normalized"))

    server = stub()
    with serving(server) as url:
        state = run(body, url)
    context = "<user>Is it?</><assistant>"
    one, other, alone = server.bodies("/generate")
    assert one["input_ids"] + other["input_ids"] == [ids(context + word) for word in ("yes", "no")]
    assert (alone["input_ids"], alone["logprob_start_len"]) == ([ids("^yes"), ids("^no")], 1)
    assert state["x"] == "yes"  # the prompt adds nothing to either: the first of equals


@pytest.mark.parametrize(("hints", "stages"), [(True, [1, 3]), (False, [4])])
def test_one_choice_computes_the_prompt_for_the_others(hints: bool, stages: list[int]) -> None:
    server = stub()
    with serving(server) as url:
        state = run(lambda s: s.__iadd__("x" + rx.select("x", list("dbca"))), url, hints=hints)
    assert [len(body["input_ids"]) for body in server.bodies("/generate")] == stages
    assert state["x"] == "a"


def test_the_first_token_of_a_text_counts_nothing() -> None:
    def first_is_none(body: Any) -> Any:
        answers = generate(body)
        for answer in answers:
            answer["meta_info"]["input_token_logprobs"][0][0] = None
        return answers

    server = stub(generate=first_is_none, tokenize=lambda body: {"tokens": [ids(text) for text in body["text"]]})
    with serving(server) as url:
        state = run(lambda s: s.__iadd__(rx.select("x", ["zb", "a"])), url)
    assert state.get_meta_info("x")["input_token_logprobs"] == [[0.0, -98.0], [0.0]]


@pytest.mark.parametrize("cumulative", [True, False])
def test_both_forms_of_stream_add_up(cumulative: bool) -> None:
    pieces, events = ["Par", "is ", "it is"], []
    for index, piece in enumerate(pieces):
        text = "".join(pieces[: index + 1]) if cumulative else piece
        events.append(generated(text, completion_tokens=len("".join(pieces[: index + 1]))))
    server = stub(generate=lambda body: Events([*events, "[DONE]"]))
    with serving(server) as url:
        state = run(lambda s: s.__iadd__("x" + rx.gen("x")), url, stream=True)
        assert list(state.text_iter("x")) == pieces
        assert state["x"] == "Paris it is"
    assert server.bodies("/generate")[0]["stream"] is True


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([generated("a"), {"error": {"message": "engine failed", "code": 500}}], "gen 'x': engine failed"),
        ([generated("a")], "ended without"),
        ([generated("a"), "{"], "no JSON"),
        ([generated("a", finish_reason={"type": "abort", "message": "by somebody"}), "[DONE]"], "aborted the request: by somebody"),
    ],
)
def test_streams_that_break_are_errors(events: list[Any], message: str) -> None:
    with serving(stub(generate=lambda body: Events(events))) as url:
        state = run(lambda s: s.__iadd__("x" + rx.gen("x")), url, stream=True)
        with pytest.raises(rx.ProgramError, match=message):
            list(state.text_iter("x"))


def test_cancelling_closes_the_connection_of_a_stream() -> None:
    server = stub(generate=lambda body: Events([generated("a"), None]))
    with serving(server) as url:
        state = run(lambda s: s.__iadd__("x" + rx.gen("x")), url, stream=True)
        assert next(state.text_iter("x")) == "a"
        state.cancel()
        loop.call(server.hung_up.wait(), SECONDS)


INTERRUPTED = """
import sys
import radixpd_lang as rx

@rx.function
def body(s):
    for fork in s.fork(2):
        fork += "x" + rx.gen("x")

body.%s
"""


@pytest.mark.parametrize(
    "way", ["run(backend=rx.RuntimeEndpoint(sys.argv[1]))", "run_batch([{}] * 3, backend=rx.RuntimeEndpoint(sys.argv[1]))"]
)
def test_an_interrupt_ends_a_run_and_its_requests(way: str) -> None:
    server = stub(generate=lambda body: Events([None]))
    with serving(server) as url:
        environment = {**os.environ, "PYTHONPATH": str(Path(rx.__file__).parents[1])}
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTED % way, url], stderr=subprocess.PIPE, env=environment)
        try:
            loop.call(server.asked(2), SECONDS)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert process.returncode == -signal.SIGINT
        assert errors.decode().rstrip().endswith("KeyboardInterrupt")
        loop.call(server.hung_up.wait(), SECONDS)


def test_a_full_server_is_asked_again() -> None:
    full = [(503, {"error": {"message": "full"}}, {"Retry-After": "0"})] * 2
    server = stub(generate=lambda body: full.pop() if full else generated("out"))
    with serving(server) as url:
        assert run(lambda s: s.__iadd__("x" + rx.gen("x")), url)["x"] == "out"
    assert len(server.bodies("/generate")) == 3


def test_a_refusal_is_told_at_once_with_its_field() -> None:
    error = {"message": "json_schema is not served yet", "param": "json_schema", "code": "unsupported_field"}
    server = stub(generate=lambda body: (400, {"error": error}))
    with (
        serving(server) as url,
        pytest.raises(rx.ProgramError, match=r"gen 'x': json_schema is not served yet \(/generate, 400\)") as raised,
    ):
        run(lambda s: s.__iadd__("x" + rx.gen("x", json_schema="{}")), url)
    cause = raised.value.__cause__
    assert isinstance(cause, rx.BackendError)
    assert (cause.status, cause.param) == (400, "json_schema")
    assert len(server.bodies("/generate")) == 1


def test_waits_end() -> None:
    server = stub(generate=lambda body: Events([None]))
    with serving(server) as url, pytest.raises(rx.ProgramError, match=r"no complete answer within 0.05 s"):
        rx.function(lambda s: s.__iadd__("x" + rx.gen("x"))).run(backend=rx.RuntimeEndpoint(url, timeout=0.05), timeout=SECONDS)
    with pytest.raises(rx.ProgramError, match="cannot connect"):
        run(lambda s: s.__iadd__("x" + rx.gen("x")), server.url)
    with pytest.raises(ValueError, match="timeout must be"):
        rx.RuntimeEndpoint(server.url, timeout=-1)
    with pytest.raises(ValueError, match="begins with http"):
        rx.RuntimeEndpoint("127.0.0.1:30000")


# OpenAI's API


def completion(body: Any) -> Any:
    if body.get("echo"):
        choices = []
        for index, text in enumerate(body["prompt"]):
            logprobs = {"tokens": list(text), "token_logprobs": [None, *(-float(ord(char)) for char in text[1:])]}
            choices.append({"index": index, "text": text, "logprobs": logprobs})
        return {"choices": choices}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    choices = [{"index": index, "text": "out", "finish_reason": "stop"} for index in range(body.get("n", 1))]
    return {"id": "c-1", "choices": choices, "usage": usage}


def chat(body: Any) -> Any:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": " Yes, it is."}, "finish_reason": "stop"}]}


def openai(url: str, **options: Any) -> rx.OpenAI:
    return rx.OpenAI("model", base_url=f"{url}/v1", api_key="k", **options)


def openai_stub(**answers: Any) -> Stub:
    return Stub({"/v1/completions": answers.get("completions", completion), "/v1/chat/completions": answers.get("chat", chat)})


def run_with(body: Any, backend: Any, **keywords: Any) -> rx.ProgramState:
    return rx.function(body).run(backend=backend, timeout=SECONDS, **keywords)


def test_openai_completions() -> None:
    server = openai_stub()
    with serving(server) as url:
        backend = openai(url, is_chat_model=False)
        state = run_with(lambda s: s.__iadd__("x" + rx.gen("x", max_tokens=4, seed=1, return_logprob=True, n=2)), backend)
    assert state["x"] == ["out", "out"]
    assert state.get_meta_info("x")["cached_tokens"] == 2
    assert server.bodies("/v1/completions") == [{"model": "model", "prompt": "x", "max_tokens": 4, "seed": 1, "logprobs": 0, "n": 2}]


def test_openai_chat() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.system("s") + rx.user("u")
        s += rx.assistant(rx.gen("x", json_schema={"type": "object"}, return_logprob=True, top_logprobs_num=1))

    server = openai_stub()
    with serving(server) as url:
        assert run_with(body, openai(url))["x"] == " Yes, it is."
    [asked] = server.bodies("/v1/chat/completions")
    assert asked["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (asked["max_tokens"], asked["logprobs"], asked["top_logprobs"]) == (128, True, 1)


def test_openai_streams() -> None:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("Pa", "ris")]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {"prompt_tokens": 9}}]
    server = openai_stub(chat=lambda body: Events([*chunks, "[DONE]"]))
    with serving(server) as url:
        state = run_with(lambda s: s.__iadd__(rx.user("u") + rx.assistant(rx.gen("x"))), openai(url), stream=True)
        assert list(state.text_iter("x")) == ["Pa", "ris"]
        meta = state.get_meta_info("x")
    assert (meta["finish_reason"]["type"], meta["prompt_tokens"]) == ("stop", 9)


@pytest.mark.parametrize("method", ["token_length_normalized", "unconditional_likelihood_normalized"])
def test_openai_select_scores_the_echo(method: str) -> None:
    with serving(openai_stub()) as url:
        backend = openai(url, is_chat_model=False)
        state = run_with(lambda s: s.__iadd__("pick " + rx.select("x", ["xbb", "xa"], choices_method=method)), backend)
    assert state.get_meta_info("x")["input_token_logprobs"] == [[-98.0, -98.0], [-97.0]]
    # Without the prompt the first token is the text's first and has no score: it is what the prompt adds.
    assert state["x"] == ("xa" if method == "token_length_normalized" else "xbb")


def test_openai_chat_takes_the_choice_nearest_to_its_answer() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.user("Is it?") + rx.assistant(rx.select("x", ["no", "yes"]))

    with serving(openai_stub()) as url:
        state = run_with(body, openai(url))
    assert state["x"] == "yes"
    assert state.get_meta_info("x")["emulated"] is True


def test_openai_goes_on_with_a_turn_where_the_server_can() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.user("u") + rx.assistant("Sure: " + rx.gen("x"))

    server = openai_stub()
    with serving(server) as url:
        run_with(body, openai(url, continue_final_message=True))
        with pytest.raises(rx.ProgramError, match="cannot go on with a turn"):
            run_with(body, openai(url))
    [asked] = server.bodies("/v1/chat/completions")
    assert asked["messages"][-1] == {"role": "assistant", "content": "Sure: "}
    assert asked["continue_final_message"] is True


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (lambda s: s.__iadd__("x" + rx.gen("x")), {}, "writes in assistant turns only"),
        (lambda s: s.__iadd__(rx.user(rx.gen("x"))), {}, "writes in assistant turns only"),
        (lambda s: s.__iadd__(rx.user("u") + rx.assistant(rx.gen("x"))), {"is_chat_model": False}, "roles need a chat model"),
        (
            lambda s: s.__iadd__(
                rx.user("u") + rx.assistant(rx.select("x", ["a", "b"], choices_method="unconditional_likelihood_normalized"))
            ),
            {},
            "does not tell the log-probability",
        ),
    ],
)
def test_openai_says_what_it_cannot_do(body: Any, options: Any, message: str) -> None:
    with serving(openai_stub()) as url, pytest.raises(rx.ProgramError, match=message):
        run_with(body, openai(url, **options))


def test_openai_needs_an_echo_with_scores_to_select() -> None:
    server = openai_stub(completions=lambda body: json.loads(json.dumps({"choices": [{"index": 0, "text": "x", "logprobs": None}]})))
    with serving(server) as url, pytest.raises(rx.ProgramError, match="does not echo log-probabilities"):
        run_with(lambda s: s.__iadd__("x" + rx.select("x", ["a", "b"])), openai(url, is_chat_model=False))
