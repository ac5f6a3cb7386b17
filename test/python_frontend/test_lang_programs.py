"""Programs against the fake backend: text, roles, variables, arguments, and what happens when something goes wrong."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import radixpd_lang as rx
from gates import SECONDS, Gate
from radixpd_lang.sampling import Sampling


def line(back: int = 0) -> int:
    """The caller's line, or one before it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno - back


def run(body: Any, backend: Any, **keywords: Any) -> rx.ProgramState:
    return rx.function(body).run(backend=backend, timeout=SECONDS, **keywords)


def test_text_grows_and_every_prompt_is_what_stands_before() -> None:
    def body(s: rx.ProgramState) -> str:
        s += "Q: " + rx.gen("question", max_tokens=4) + "\nA: "
        s += rx.gen("answer")
        return str(s["answer"])

    fake = rx.Fake({"question": "why?", "answer": "because"})
    state = run(body, fake)
    assert fake.prompts() == ["Q: ", "Q: why?\nA: "]
    assert (state["question"], state["answer"], state.ret_value) == ("why?", "because", "because")
    assert state.text() == "Q: why?\nA: because"
    assert "answer" in state
    assert "other" not in state


def test_roles_make_messages() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.system("Be brief.")
        with s.user():
            s += "Hi, "
            s += "there"
        s.assistant(rx.gen("one"))
        s += rx.user_begin() + "And?" + rx.user_end()
        s += rx.assistant_begin() + "Well, " + rx.gen("two")

    fake = rx.Fake({"one": "Hello", "two": "no"})
    state = run(body, fake)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi, there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Well, no"},
    ]
    assert state.text() == "system: Be brief.\nuser: Hi, there\nassistant: Hello\nuser: And?\nassistant: Well, no"
    first, second = [call.prompt for call in fake.calls]
    assert (len(first.messages), first.role, first.text) == (2, "assistant", "")
    assert (len(second.messages), second.role, second.text) == (4, "assistant", "Well, ")


def test_a_gen_does_not_wait_and_a_read_does() -> None:
    gate, reached = Gate(), []

    def body(s: rx.ProgramState) -> None:
        s += rx.gen("slow") + " then " + rx.gen("next")
        assert gate.asked.wait(SECONDS)
        reached.append("after gen")
        gate.open("done")
        reached.append(s["slow"])

    state = run(body, rx.Fake({"slow": gate, "next": "more"}))
    assert reached == ["after gen", "done"]
    assert state.text() == "done then more"


def test_a_variable_can_go_into_another_branch_before_it_is_there() -> None:
    gate = Gate()

    def body(s: rx.ProgramState) -> None:
        left, right = s.fork(2)
        left += "left " + rx.gen("slow")
        right += "right of " + left.var("slow") + ": " + rx.gen("end")
        assert gate.asked.wait(SECONDS)
        gate.open("it")
        s.set_var("text", right.text())

    assert run(body, rx.Fake({"slow": gate, "end": "."}))["text"] == "right of it: ."


def test_the_last_value_of_a_name_counts() -> None:
    def body(s: rx.ProgramState) -> None:
        found = []
        for turn in range(3):
            s += f"{turn}: " + rx.gen("answer") + "\n"
            found.append(s["answer"])
        s.set_var("all", found)

    state = run(body, rx.Fake({"answer": ["a", "b", "c"]}))
    assert state["all"] == ["a", "b", "c"]
    assert state["answer"] == state.get_var("answer") == "c"


def test_n_gives_a_list_and_goes_on_with_the_first() -> None:
    state = run(lambda s: s.__iadd__(rx.gen("x", n=3)).__iadd__("!"), rx.Fake({"x": ["a", "b", "c"]}))
    assert state["x"] == ["a", "b", "c"]
    assert state.text() == "a!"
    assert len(state.get_meta_info("x")["samples"]) == 3


def test_a_dtype_is_a_grammar_and_a_type() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.gen_int("i") + rx.gen("f", dtype="float") + rx.gen("b", dtype=bool) + rx.gen_string("t")

    fake = rx.Fake({"i": "-12", "f": "2.5", "b": "False", "t": r'"a\"b"'})
    state = run(body, fake)
    assert [state[name] for name in "ifbt"] == [-12, 2.5, False, 'a"b']
    assert all(call.sampling.regex for call in fake.calls)
    with pytest.raises(rx.ProgramError, match="'twelve' does not fit its dtype"):
        run(body, rx.Fake({"i": "twelve"}))


def test_arguments_of_gen_go_over_those_of_run() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.gen("x", temperature=0.5) + rx.gen("y", 7, json_schema={"type": "object"})
        s += rx.gen("z", regex="a+", seed=3)

    fake = rx.Fake()
    run(body, fake, temperature=0.25, max_new_tokens=9, stop=["\n"])
    x, y, z = [call.sampling for call in fake.calls]
    assert (x.temperature, x.max_tokens, x.stop) == (0.5, 9, ["\n"])
    assert (y.temperature, y.max_tokens) == (0.25, 7)
    assert json.loads(y.json_schema or "") == {"type": "object"}
    assert (z.regex, z.seed) == ("a+", 3)
    assert x.said() == {"temperature": 0.5, "max_tokens": 9, "stop": ["\n"]}


def test_a_grammar_replaces_another_ones_default() -> None:
    assert Sampling(regex="a", top_k=3).over(Sampling(ebnf="root ::= x", temperature=1.0)) == Sampling(regex="a", top_k=3, temperature=1.0)


def test_a_seed_of_the_run_makes_one_for_each_gen() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.gen("x") + rx.gen("x")
        for fork in s.fork(2):
            fork += rx.gen("x")

    def seeds(**keywords: Any) -> set[int | None]:
        fake = rx.Fake()
        run(body, fake, **keywords)
        return {call.sampling.seed for call in fake.calls}

    assert len(seeds(seed=1)) == 4
    assert seeds(seed=1) == seeds(seed=1) != seeds(seed=2)
    assert seeds() == {None}


def test_a_scope_is_a_variable_of_all_text_in_it() -> None:
    def body(s: rx.ProgramState) -> None:
        s += "before "
        with s.var_scope("part"):
            s += "one " + rx.gen("x") + " two"
        s += " after"

    assert run(body, rx.Fake({"x": "X"}))["part"] == "one X two"


def test_programs_call_programs_and_are_bound() -> None:
    @rx.function
    def inner(s: rx.ProgramState, word: str, mark: str = "!") -> str:
        s += word + mark + rx.gen("x")
        return str(s["x"])

    @rx.function
    def outer(s: rx.ProgramState) -> str:
        return inner(s, "a") + inner.bind(mark="?")(s, word="b")

    state = outer.run(backend=rx.Fake({"x": ["1", "2"]}), timeout=SECONDS)
    assert (state.text(), state.ret_value) == ("a!1b?2", "12")
    assert inner.bind(word="w").run(backend=rx.Fake(), mark="-").text() == "w-[x]"
    assert inner("z", backend=rx.Fake()).text() == "z![x]"
    with pytest.raises(TypeError, match="wodr"):
        inner.bind(wodr="w")
    with pytest.raises(TypeError, match="missing a required argument: 'word'"):
        inner.run(backend=rx.Fake())


def test_the_default_backend() -> None:
    program = rx.function(lambda s: s.__iadd__(rx.gen("x")))
    with pytest.raises(rx.LangError, match="set_default_backend"):
        program.run()
    rx.set_default_backend(rx.Fake({"x": "y"}))
    try:
        assert program.run()["x"] == "y"
        with pytest.raises(rx.LangError, match="only a RuntimeEndpoint"):
            rx.flush_cache()
    finally:
        rx.set_default_backend(None)


# What goes wrong


class Refusing(rx.Fake):
    async def generate(self, prompt: rx.Prompt, sampling: Sampling, *, name: str | None) -> list[rx.Completion]:
        if name == "bad":
            raise rx.BackendError("temperature must be between 0 and 100, got -1.0 (400)", status=400, param="temperature")
        return await super().generate(prompt, sampling, name=name)


def test_an_error_carries_the_line_of_the_gen_and_the_cause() -> None:
    where = []

    def body(s: rx.ProgramState) -> None:
        s += rx.gen("good")
        s += "text " + rx.gen("bad")
        where.append(line(1))
        s += rx.gen("never")

    with pytest.raises(rx.ProgramError) as raised:
        run(body, Refusing())
    error = raised.value
    assert str(error) == f"{__file__}:{where[0]}: gen 'bad': temperature must be between 0 and 100, got -1.0 (400)"
    assert isinstance(error.__cause__, rx.BackendError)
    assert error.__cause__.param == "temperature"


def test_an_error_in_a_with_block_carries_its_line_too() -> None:
    where = []

    def body(s: rx.ProgramState) -> None:
        with s.user(), s.system():
            where.append(line(1))

    with pytest.raises(rx.ProgramError) as raised:
        run(body, rx.Fake())
    assert str(raised.value).startswith(f"{__file__}:{where[0]}: system: a system turn inside the user turn")


def test_reading_what_failed_or_comes_after_it_raises_the_same() -> None:
    seen: list[str] = []

    def body(s: rx.ProgramState) -> None:
        s += rx.gen("bad") + rx.gen("after")
        for read in (lambda: s["bad"], lambda: s["after"], s.text, s.messages, s.sync, lambda: s.get_meta_info("after")):
            with pytest.raises(rx.ProgramError) as raised:
                read()
            seen.append(str(raised.value))
        assert isinstance(s.error(), rx.ProgramError)

    run(body, Refusing())  # the program was told: it is up to it
    assert len(seen) == 6
    assert len(set(seen)) == 1
    assert "gen 'bad'" in seen[0]


def test_an_error_that_nobody_reads_ends_the_run() -> None:
    def body(s: rx.ProgramState) -> None:
        for fork in s.fork(3):
            fork += rx.gen("bad")

    with pytest.raises(rx.ProgramError, match="gen 'bad'"):
        run(body, Refusing())


def test_an_unknown_variable_is_a_key_error_at_once() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.gen("answer")
        s["anwser"]

    with pytest.raises(KeyError, match="'anwser' has been set; there are: answer"):
        run(body, rx.Fake())


def test_an_error_of_the_programs_own_ends_what_is_under_way() -> None:
    gate = Gate()

    def body(s: rx.ProgramState) -> None:
        s += rx.gen("slow")
        assert gate.asked.wait(SECONDS)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(body, rx.Fake({"slow": gate}))
    assert gate.cancelled.is_set()


def test_a_program_ends_at_its_deadline() -> None:
    gate = Gate()

    def body(s: rx.ProgramState) -> None:
        s += rx.gen("slow") + rx.gen("next")

    with pytest.raises(rx.ProgramTimeout, match=r"gen 'slow' was not done when the program's 0.05 s were over") as raised:
        rx.function(body).run(backend=rx.Fake({"slow": gate}), timeout=0.05)
    assert isinstance(raised.value, TimeoutError)
    assert gate.cancelled.is_set()
    with pytest.raises(ValueError, match="timeout must be"):
        rx.function(body).run(backend=rx.Fake(), timeout=0)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([rx.user("a"), "b"], "text between two turns"),
        (["a", rx.user("b")], "text outside a turn, then a role"),
        ([rx.user(rx.system("a"))], "a system turn inside the user turn"),
        ([rx.user_begin(), rx.assistant_end()], "the assistant turn ends here, but the user turn is open"),
        ([rx.user("a"), rx.gen("x")], "gen 'x': text between two turns"),
    ],
)
def test_text_and_turns_that_do_not_fit(nodes: list[Any], message: str) -> None:
    def body(s: rx.ProgramState) -> None:
        for node in nodes:
            s += node

    fake = rx.Fake()
    with pytest.raises(rx.ProgramError, match=message):
        run(body, fake)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rx.gen("x", regex="("), "regex"),
        (lambda: rx.gen("x", regex="a", ebnf="root ::= x"), "one grammar, not regex and ebnf"),
        (lambda: rx.gen("x", dtype=list), "dtype must be one of int, float, bool, str"),
        (lambda: rx.gen("x", dtype=int, regex="a"), "dtype is a grammar"),
        (lambda: rx.gen("x", choices=["a"], dtype=int), "choices leave nothing to dtype"),
        (lambda: rx.gen("x", json_schema="{"), "json_schema is no JSON"),
        (lambda: rx.gen("x", n=0), "n must be 1 or more"),
        (lambda: rx.select("x", []), "choices must be a list of texts"),
        (lambda: rx.select("x", "ab"), "choices must be a list of texts"),
        (lambda: rx.select("x", ["a", ""]), "none of them empty"),
        (lambda: rx.select("x", ["a", "a"]), "choices must differ"),
        (lambda: rx.select("x", ["a"], choices_method="best"), "choices_method must be one of token_length_normalized"),
        (lambda: rx.gen("x", json_schema=3), "json_schema must be"),  # type: ignore[arg-type]
        (lambda: rx.user(3), "a turn holds text and expressions, got int"),  # type: ignore[arg-type]
        (lambda: rx.gen(3), "a variable's name is text"),  # type: ignore[arg-type]
        (lambda: rx.function(lambda s, temperature: None), "temperature is an argument of run"),
        (lambda: rx.function(lambda: None), "its first argument is the state"),
        (lambda: rx.gen("x") + 3, "unsupported operand"),
    ],
)
def test_wrong_arguments_are_refused_where_they_stand(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_state_takes_text_only() -> None:
    def body(s: rx.ProgramState) -> None:
        s += 3  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="got int"):
        run(body, rx.Fake())
