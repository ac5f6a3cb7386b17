"""Batches: order, failures, progress, laziness, and the prefix that all programs share."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import radixpd_lang as rx
from gates import LONG, SECONDS, Gate
from radixpd_lang.progress import Progress
from radixpd_lang.sampling import Sampling
from radixpd_lang.transcript import Message, Prompt, common_prompt

SHOTS = "".join(f"Q: What is {n} + {n}?\nA: {2 * n}\n" for n in range(6))


@rx.function
def few_shot(s: Any, question: str) -> None:
    s += SHOTS + f"Q: {question}\nA:" + rx.gen("answer", stop="\n")


class Refusing(rx.Fake):
    async def generate(self, prompt: rx.Prompt, sampling: Sampling, *, name: str | None) -> list[rx.Completion]:
        if "bad" in str(prompt):
            raise rx.BackendError("refused")
        return await super().generate(prompt, sampling, name=name)


def calls(count: int, word: str = "") -> list[dict[str, str]]:
    return [{"question": f"{word}{index}"} for index in range(count)]


@pytest.mark.parametrize("threads", [1, 3, "auto"])
def test_states_come_in_the_order_of_the_batch(threads: Any) -> None:
    backend = rx.Fake({"answer": lambda prompt, sampling: str(prompt).split()[-2]})
    states = few_shot.run_batch(calls(20), backend=backend, num_threads=threads, timeout=SECONDS)
    assert [state["answer"] for state in states] == [str(index) for index in range(20)]


def test_the_constant_prefix_is_found_and_computed_first() -> None:
    backend = rx.Fake()
    few_shot.run_batch(calls(8, "What is "), backend=backend, timeout=SECONDS)
    assert backend.calls[0].kind == "warm"
    assert backend.prompts("warm") == [f"{SHOTS}Q: What is "]
    assert len(backend.calls) == 9


def test_the_constant_prefix_of_a_conversation() -> None:
    def body(s: rx.ProgramState, question: str) -> None:
        s += rx.system("You are " + "very " * 20 + "helpful.")
        s += rx.user(f"Please: {question}")
        s += rx.assistant(rx.gen("answer"))

    backend = rx.Fake()
    rx.function(body).run_batch(calls(5), backend=backend, timeout=SECONDS)
    warmed = backend.calls[0].prompt
    assert [message.role for message in warmed.messages] == ["system"]
    assert (warmed.role, warmed.text) == ("user", "Please: ")


@pytest.mark.parametrize("way", ["no hints", "one program", "nothing in common", "short", "no request", "raises"])
def test_no_prefix_no_hint(way: str) -> None:
    def body(s: rx.ProgramState, question: str) -> None:
        if way == "raises":
            raise ZeroDivisionError
        if way == "no request":
            s += SHOTS
            return
        s += (question if way == "nothing in common" else "") + (SHOTS if way != "short" else "Q: ") + question + rx.gen("answer")

    backend = rx.Fake()
    batch = calls(1 if way == "one program" else 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rx.function(body).run_batch(batch, backend=backend, hints=way != "no hints", timeout=SECONDS)
    assert backend.prompts("warm") == []


def test_tracing_for_the_prefix_stops_at_the_first_read() -> None:
    read: list[str] = []

    def body(s: rx.ProgramState, question: str) -> None:
        s += SHOTS + question + rx.gen("answer")
        read.append(s["answer"])

    rx.function(body).run_batch(calls(3), backend=rx.Fake(), timeout=SECONDS)
    assert read == ["[answer]"] * 3


def test_a_failure_stays_in_its_own_state() -> None:
    batch = [{"question": "good"}, {"question": "bad"}, {"question": "fine"}]
    with pytest.warns(UserWarning, match="1 of the programs failed; the first error: .*gen 'answer': refused"):
        good, bad, fine = few_shot.run_batch(batch, backend=Refusing(), timeout=SECONDS)
    assert good["answer"] == fine["answer"] == "[answer]"
    assert (good.error(), fine.error()) == (None, None)
    with pytest.raises(rx.ProgramError, match="refused"):
        bad["answer"]
    assert isinstance(bad.error(), rx.ProgramError)


def test_an_error_of_the_functions_own_stays_there_too() -> None:
    def body(s: rx.ProgramState, n: int) -> None:
        s += str(1 // n) + rx.gen("x")

    with pytest.warns(UserWarning, match="division"):
        one, zero = rx.function(body).run_batch([{"n": 1}, {"n": 0}], backend=rx.Fake(), timeout=SECONDS)
    assert one["x"] == "[x]"
    assert isinstance(zero.error(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        zero["x"]


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    backend = rx.Fake()
    with pytest.raises(TypeError, match=r"batch\[2\]: missing a required argument: 'question'"):
        few_shot.run_batch([*calls(2), {"qestion": "a"}], backend=backend)
    assert backend.calls == []
    with pytest.raises(TypeError, match="run_batch has no argument tempreture"):
        few_shot.run_batch(calls(2), backend=rx.Fake(), tempreture=1)
    with pytest.raises(ValueError, match="num_threads must be between 1 and"):
        few_shot.run_batch(calls(2), backend=rx.Fake(), num_threads=0)


def test_generator_style_starts_programs_as_states_are_taken() -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def body(s: rx.ProgramState, n: int) -> None:
        with lock:
            begun.append(n)
        s += str(n) + rx.gen("x")

    def endless() -> Iterator[dict[str, int]]:
        n = 0
        while True:
            yield {"n": n}
            n += 1

    states = rx.function(body).run_batch(endless(), backend=rx.Fake(), num_threads=2, generator_style=True, hints=False, timeout=SECONDS)
    assert begun == []
    assert [next(states).text() for _ in range(5)] == [f"{n}[x]" for n in range(5)]
    states.close()  # type: ignore[attr-defined]
    assert len(begun) <= 5 + 2 * 2
    assert list(few_shot.run_batch([], backend=rx.Fake(), generator_style=True)) == []


@pytest.mark.timeout(60)
def test_leaving_a_generator_cancels_what_runs_and_starts_nothing_more() -> None:
    gates = {f"x{n}": Gate() for n in (1, 2, 3)}
    begun: set[int] = set()

    def body(s: rx.ProgramState, n: int) -> None:
        begun.add(n)
        s += rx.gen(f"x{n}")

    backend = rx.Fake({"x0": "now", **gates})
    batch = [{"n": n} for n in range(9)]
    states = rx.function(body).run_batch(batch, backend=backend, num_threads=3, generator_style=True, hints=False, timeout=LONG)
    next(states)
    assert all(gate.asked.wait(SECONDS) for gate in gates.values())  # programs 4 and 5 wait for a thread
    states.close()  # type: ignore[attr-defined]
    assert all(gate.cancelled.is_set() for gate in gates.values())
    assert begun == {0, 1, 2, 3}


def test_seeds_of_a_batch_follow_each_other() -> None:
    def seeds(seed: int, count: int) -> list[int | None]:
        backend = rx.Fake()
        few_shot.run_batch(calls(count), backend=backend, seed=seed, num_threads=1, timeout=SECONDS)
        return [call.sampling.seed for call in backend.calls if call.kind == "generate"]

    assert seeds(5, 3)[1:] == seeds(6, 2)
    assert len(set(seeds(5, 3))) == 3


def test_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    few_shot.run_batch(calls(3), backend=rx.Fake(), progress_bar=True, timeout=SECONDS)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "few_shot:  [########################] 3/3" in last
    out = io.StringIO()
    bar = Progress("name", None, out)
    bar.advance(failed=True)
    bar.close()
    assert "name:  1" in out.getvalue()
    assert "1 failed" in out.getvalue()


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (Prompt(text="abc"), Prompt(text="abd"), Prompt(text="ab")),
        (Prompt(text="abc"), Prompt((Message("user", "abc"),)), Prompt()),
        (
            Prompt((Message("system", "s"), Message("user", "what")), "assistant"),
            Prompt((Message("system", "s"), Message("user", "when")), "assistant"),
            Prompt((Message("system", "s"),), "user", "wh"),
        ),
        (
            Prompt((Message("user", "u"),), "assistant", "well"),
            Prompt((Message("user", "u"), Message("assistant", "welcome"))),
            Prompt((Message("user", "u"),), "assistant", "wel"),
        ),
        (Prompt((Message("user", "u"),)), Prompt((Message("user", "u"),)), Prompt((Message("user", "u"),))),
        (Prompt((Message("user", "u"),)), Prompt((Message("system", "u"),)), Prompt()),
    ],
)
def test_what_two_prompts_begin_with(one: Prompt, other: Prompt, common: Prompt) -> None:
    assert common_prompt(one, other) == common == common_prompt(other, one)
