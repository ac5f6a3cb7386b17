"""The ideal cache against a slow search, and the figures that are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.bench_programs import EXAMPLES, FOLDER, example, figures, main, table
from benchmark.optimum import Exchange, optimal

PAGE = 4


def exchange(prompt: list[int], output: list[int], began: float, ended: float, cached: int = 0, hint: bool = False) -> Exchange:
    return Exchange(prompt, output, cached, began, ended, hint)


def test_a_prompt_is_there_from_its_beginning_an_output_from_its_end() -> None:
    one = exchange([1] * 8, [2] * 5, 0.0, 2.0)
    during = exchange([1] * 8 + [2] * 4, [], 1.0, 3.0)
    after = exchange([1] * 8 + [2] * 4 + [3], [], 4.0, 5.0)
    assert optimal([after, during, one], PAGE) == [12, 8, 0]


def test_a_match_is_never_the_whole_prompt_nor_a_part_of_a_page() -> None:
    first = exchange(list(range(10)), [], 0.0, 1.0)
    assert optimal([first, exchange(list(range(8)), [], 2.0, 3.0)], PAGE) == [0, 4]
    assert optimal([first, exchange(list(range(9)), [], 2.0, 3.0)], PAGE) == [0, 8]
    assert optimal([first, exchange([*range(7), 99, 99], [], 2.0, 3.0)], PAGE) == [0, 4]


def test_the_last_token_of_an_output_is_not_in_the_cache() -> None:
    one = exchange([1, 1], [2, 2], 0.0, 1.0)
    more = exchange([1, 1], [2, 2, 2], 0.0, 1.0)
    later = exchange([1, 1, 2, 2, 3], [], 2.0, 3.0)
    assert optimal([one, later], PAGE)[1] == 0
    assert optimal([more, later], PAGE)[1] == 4


ids = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(st.tuples(ids, st.lists(st.integers(0, 1), max_size=6), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_the_trie_finds_what_a_search_finds(made: list[tuple[list[int], list[int], int, int]]) -> None:
    exchanges = [
        exchange(prompt, output, 10 * began + index, 10 * began + 10 * took) for index, (prompt, output, began, took) in enumerate(made)
    ]
    found = optimal(exchanges, PAGE)
    for index, each in enumerate(exchanges):
        seen = [list(other.prompt) for place, other in enumerate(exchanges) if (other.began, place) < (each.began, index)]
        seen += [[*other.prompt, *other.output][:-1] for other in exchanges if other.ended < each.began]
        best = max((_common(each.prompt, other) // PAGE * PAGE for other in seen), default=0)
        assert found[index] == min(best, (len(each.prompt) - 1) // PAGE * PAGE)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def row(**changes: Any) -> dict[str, Any]:
    made = [
        exchange([1] * 8, [2] * 2, 0.0, 1.0),
        exchange([1] * 9, [3] * 4, 2.0, 3.0, cached=4),
        exchange([1] * 6, [], 2.0, 3.0, hint=True),
    ]
    return {"example": "rag", "way": "cache, hints", "programs": 2, "seconds": 4.0, **figures(made, PAGE, 4.0), **changes}


def test_figures() -> None:
    found = row()
    assert (found["requests"], found["hints"], found["output_tokens"], found["output_throughput"]) == (2, 1, 6, 1.5)
    assert (found["prompt_tokens"], found["cached_tokens"], found["computed_tokens"], found["optimal_cached_tokens"]) == (23, 4, 19, 12)
    assert (found["hit_rate"], found["share_of_optimum"]) == (4 / 23, 4 / 12)


def test_the_table_has_a_line_for_each_run_and_sums() -> None:
    lines = table([row(), row(way="no cache", share_of_optimum=None), row(example="judge")]).splitlines()
    assert [line.split()[0] for line in lines] == ["example", "rag", "rag", "judge", "all", "all"]
    assert lines[1].split()[-4:] == ["17.4", "%", "33.3", "%"]
    assert lines[2].split()[-1] == "-"
    assert lines[4].split()[-4:] == ["17.4", "%", "33.3", "%"]


def test_every_example_is_measured() -> None:
    assert sorted(EXAMPLES) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert all(callable(example(name).run) for name in EXAMPLES)


def test_a_server_that_does_not_start_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", "/nowhere", "--examples", "rag"]) == 2
    assert "the server ended with exit code" in capfd.readouterr().err
