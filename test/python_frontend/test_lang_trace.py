"""Traces: what a program would do, without a model."""

from __future__ import annotations

import radixpd_lang as rx


@rx.function
def tour(s: rx.ProgramState, place: str, points: int = 2) -> None:
    s += rx.system("You know " + place + ".")
    s += rx.user(rx.gen("question", max_tokens=8))
    forks = s.fork(points)
    for index, fork in enumerate(forks):
        fork += rx.assistant(f"Point {index}: " + rx.gen("point", temperature=0.5))
    forks.join()
    s.commit()
    s += rx.assistant(rx.select("mood", ["good", "bad"]) + " " + s.var("question"))


def test_a_trace_is_the_tree_of_a_program() -> None:
    trace = tour.trace()
    assert trace.variables == ["question", "point", "mood"]
    assert trace.ended is None
    assert str(trace).splitlines() == [
        "system",
        "  text 'You know {place}.'",
        "user",
        "  gen question(max_tokens=8)",
        "fork 2",
        "  branch 0",
        "    assistant",
        "      text 'Point 0: '",
        "      gen point(temperature=0.5)",
        "  branch 1",
        "    assistant",
        "      text 'Point 1: '",
        "      gen point(temperature=0.5)",
        "commit",
        "assistant",
        "  select mood('good', 'bad')",
        "  text ' '",
        "  variable question",
    ]


def test_arguments_that_are_given_stand_in_the_trace() -> None:
    assert "You know Rome." in str(tour.trace("Rome", points=1))
    assert "fork 1" in str(tour.bind(points=1).trace())


def test_a_program_that_computes_with_what_the_model_writes_is_traced_up_to_there() -> None:
    @rx.function
    def counted(s: rx.ProgramState) -> None:
        s += "How many? " + rx.gen("count")
        for _ in range(int(s["count"])):
            s += "x"

    trace = counted.trace()
    assert str(trace).splitlines()[:2] == ["text 'How many? '", "gen count()"]
    assert trace.ended is not None
    assert "invalid literal" in trace.ended[0]
    assert trace.ended[1].file == __file__


def test_what_the_model_would_write_fits_its_dtype() -> None:
    @rx.function
    def counted(s: rx.ProgramState) -> None:
        s += rx.gen("n", dtype=int) + rx.gen("f", dtype=float) + rx.gen("t", dtype=str) + rx.gen("b", dtype=bool)
        assert (s["n"], s["f"], s["t"], s["b"]) == (0, 0.0, "", True)

    assert counted.trace().ended is None


def test_every_node_knows_its_line() -> None:
    lines = [node.place.line for node in tour.trace().walk()]
    assert all(node.place.file == __file__ for node in tour.trace().walk())
    assert lines[0] == tour.place.line + 2
    assert len(set(lines)) == 5
