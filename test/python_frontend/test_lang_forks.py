"""Forks and joins: branches run at the same time, begin where the fork is, and their prefix goes to the server once."""

from __future__ import annotations

from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import radixpd_lang as rx
from gates import SECONDS, Gate

PREFIX = "All of this was said before the fork, and it is long enough to be worth a hint to the server. "


def run(body: Any, backend: Any, **keywords: Any) -> rx.ProgramState:
    return rx.function(body).run(backend=backend, timeout=SECONDS, **keywords)


def ask_in_branches(s: rx.ProgramState, size: int = 3) -> None:
    s += PREFIX
    forks = s.fork(size)
    for index, fork in enumerate(forks):
        fork += f"{index}: " + rx.gen("x")
    forks.join()


def test_the_prefix_of_a_fork_is_computed_once_and_before_its_branches() -> None:
    fake = rx.Fake()
    state = run(ask_in_branches, fake)
    assert [call.kind for call in fake.calls] == ["warm"] + ["generate"] * 3
    assert fake.prompts("warm") == [PREFIX]
    assert sorted(fake.prompts()) == [f"{PREFIX}{index}: " for index in range(3)]
    assert state["x"] == ["[x]"] * 3


@pytest.mark.parametrize("way", ["no hints", "one branch", "short", "known"])
def test_a_hint_that_would_save_nothing_is_not_sent(way: str) -> None:
    def body(s: rx.ProgramState) -> None:
        s += PREFIX[:10] if way == "short" else PREFIX
        if way == "known":
            s += rx.gen("x", max_tokens=4) + "and"
        for fork in s.fork(1 if way == "one branch" else 2):
            fork += rx.gen("y")

    fake = rx.Fake()
    run(body, fake, hints=way != "no hints")
    assert fake.prompts("warm") == []


def test_a_hint_that_fails_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    class Cold(rx.Fake):
        async def warm(self, prompt: rx.Prompt) -> None:
            raise rx.BackendError("no cache here")

    assert run(ask_in_branches, Cold())["x"] == ["[x]"] * 3
    assert "no cache here" in caplog.text


def test_commit_is_a_hint_of_the_programs_own() -> None:
    def body(s: rx.ProgramState) -> None:
        s += PREFIX
        s.commit()
        s += rx.gen("x")

    fake = rx.Fake()
    run(body, fake)
    assert [call.kind for call in fake.calls] == ["warm", "generate"]


def test_branches_run_at_the_same_time() -> None:
    gates = [Gate() for _ in range(5)]

    def body(s: rx.ProgramState) -> None:
        forks = s.fork(5)
        forks += [rx.gen(f"x{index}") for index in range(5)]
        assert all(gate.asked.wait(SECONDS) for gate in gates)  # nobody has been answered yet
        for index, gate in enumerate(gates):
            gate.open(str(index))
        s.set_var("all", [fork[f"x{index}"] for index, fork in enumerate(forks)])

    assert run(body, rx.Fake({f"x{index}": gate for index, gate in enumerate(gates)}))["all"] == list("01234")


def test_branches_know_the_past_and_not_each_other() -> None:
    def body(s: rx.ProgramState) -> None:
        s += "past " + rx.gen("old") + " "
        one, two = forks = s.fork(2)
        one += "one " + rx.gen("new")
        two += "two "
        assert one["old"] == two["old"] == "was"
        assert "new" not in two
        assert "new" not in s
        s += "main"
        assert [fork.text() for fork in forks] == ["past was one is", "past was two "]
        assert s.text() == "past was main"

    run(body, rx.Fake({"old": "was", "new": "is"}))


def test_join_gathers_what_branches_have_set() -> None:
    def body(s: rx.ProgramState) -> None:
        s.set_var("kept", 1)
        with s.fork(3) as forks:
            forks += "a" + rx.gen("x")
            forks[1] += rx.gen("y")
            forks[2].set_var("z", 7)
        assert forks["x"] == ["0", "1", "2"]

    state = run(body, rx.Fake({"x": [str(n) for n in range(3)], "y": "only"}))
    assert sorted(state["x"]) == ["0", "1", "2"]
    assert state["y"] == [None, "only", None]
    assert (state["z"], state["kept"]) == ([None, None, 7], 1)


def test_join_does_not_wait() -> None:
    gate = Gate()

    def body(s: rx.ProgramState) -> None:
        forks = s.fork(2)
        forks += rx.gen("slow")
        forks.join()
        s += "next"
        gate.open("done")

    state = run(body, rx.Fake({"slow": gate}))
    assert state["slow"] == ["done", "done"]


def test_join_can_append_the_branches() -> None:
    def body(s: rx.ProgramState, role: bool) -> None:
        s += rx.user("Two points.") + rx.assistant_begin() + "Points:" if role else "Points:"
        forks = s.fork(2)
        forks += [f" {index}. " + rx.gen(f"x{index}") for index in range(2)]
        forks.join("concate_and_append")
        s += " End."

    fake = rx.Fake({"x0": "zero", "x1": "one"})
    assert run(body, fake, role=False).text() == "Points: 0. zero 1. one End."
    assert run(body, fake, role=True).messages()[-1]["content"] == "Points: 0. zero 1. one End."


def test_appending_a_branch_that_went_on_to_another_turn_is_refused() -> None:
    def body(s: rx.ProgramState) -> None:
        s += rx.user("a")
        forks = s.fork(2)
        forks += rx.assistant(rx.gen("x"))
        forks.join("concate_and_append")

    with pytest.raises(rx.ProgramError, match="stayed in the turn"):
        run(body, rx.Fake())


def test_an_error_of_a_branch_reaches_those_who_join_it_and_no_other() -> None:
    class Refusing(rx.Fake):
        async def generate(self, prompt: rx.Prompt, sampling: rx.Sampling, *, name: str | None) -> list[rx.Completion]:
            if str(prompt).endswith("1"):
                raise rx.BackendError("not this one")
            return await super().generate(prompt, sampling, name=name)

    def body(s: rx.ProgramState) -> str:
        forks = s.fork(3)
        forks += [f"{index}" + rx.gen("x") for index in range(3)]
        assert forks[0]["x"] == forks[2]["x"] == "[x]"
        forks.join()
        s += "after"
        with pytest.raises(rx.ProgramError, match="not this one"):
            s["x"]
        return "told"

    assert run(body, Refusing()).ret_value == "told"


def test_forks_of_forks_and_copies() -> None:
    def body(s: rx.ProgramState) -> None:
        s += "0"
        with s.copy() as tried:
            tried += "!" + rx.gen("x")
        outer = s.fork(2)
        for fork in outer:
            fork += "1"
            inner = fork.fork(2)
            inner += "2" + rx.gen("x")
            inner.join()
        outer.join()

    state = run(body, rx.Fake({"x": "v"}))
    assert state["x"] == [["v", "v"], ["v", "v"]]
    assert state.text() == "0"


def test_a_list_must_have_one_for_each_branch() -> None:
    def body(s: rx.ProgramState) -> None:
        forks = s.fork(2)
        forks += ["a"]

    with pytest.raises(ValueError, match="one for each of 2 branches, got 1"):
        run(body, rx.Fake())
    with pytest.raises(ValueError, match="between 1 and 4096 branches, got 0"):
        run(lambda s: s.fork(0), rx.Fake())
    with pytest.raises(ValueError, match="mode must be"):
        run(lambda s: s.fork(1).join("zip"), rx.Fake())
    with pytest.raises(TypeError, match="cannot be replaced"):
        run(lambda s: s.fork(1).__setitem__(0, s), rx.Fake())


def test_programs_go_into_branches() -> None:
    @rx.function
    def ask(s: rx.ProgramState, what: str = "why") -> None:
        s += what + rx.gen("x")

    def body(s: rx.ProgramState) -> None:
        forks = s.fork(2)
        forks += ask
        assert [fork.text() for fork in forks] == ["why[x]"] * 2

    run(body, rx.Fake())


def test_programs_of_a_batch_run_at_the_same_time() -> None:
    barrier = Barrier(4)

    def body(s: rx.ProgramState, n: int) -> None:
        barrier.wait(SECONDS)
        s += str(n) + rx.gen("x")

    try:
        states = rx.function(body).run_batch([{"n": n} for n in range(4)], backend=rx.Fake(), hints=False, num_threads=4)
    except BrokenBarrierError:
        pytest.fail("one program waited for another to end")
    assert [state.text() for state in states] == [f"{n}[x]" for n in range(4)]
