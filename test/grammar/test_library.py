"""The runner's grammars and the compiler behind them: real processes, a vocabulary of bytes."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bytes_vocabulary import VOCABULARY, allowed, encode

from radixpd.core.request import Grammar
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.library import Answer, CompileLimits, Library
from radixpd.grammar.requests import grammar_of

SECONDS = 120.0
NOUGHT = 'root ::= "a" root'


@pytest.fixture
def library() -> Iterator[Library]:
    opened = Library("llguidance", lambda: VOCABULARY, encode)
    yield opened
    opened.close()


def answers(library: Library, count: int) -> dict[int, Answer]:
    """So many answers."""
    found: dict[int, Answer] = {}
    deadline = time.monotonic() + SECONDS
    while len(found) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only {sorted(found)} were answered"
        select.select([library.fd], [], [], left)
        found |= {each.id: each for each in library.take()}
    return found


def test_a_grammar_is_ready_once_it_is_answered_for(library: Library) -> None:
    grammar = grammar_of("regex", "ab|cd")
    with pytest.raises(GrammarError, match="not ready"):
        library.guide(grammar)
    library.want(1, grammar)
    assert answers(library, 1)[1] == Answer(1)
    assert allowed(library.guide(grammar)) == encode("ac")
    library.want(2, grammar)  # from now on at once
    assert [each.id for each in library.take()] == [2]
    library.forget(grammar)
    library.want(3, grammar)
    assert [each.id for each in library.take()] == [3]
    library.forget(grammar)


def test_what_cannot_be_compiled_is_answered_with_the_reason(library: Library) -> None:
    library.want(11, Grammar("ebnf", "root ::= nowhere"))
    library.want(12, Grammar("ebnf", 'root ::= root "a"'))
    found = answers(library, 2)
    assert found[11].error.startswith("the request's grammar is refused: ")
    assert "nowhere" in found[11].error
    assert found[11].status == 400
    assert "no text fits" in found[12].error


@pytest.mark.full
def test_so_08_slow_grammars_cost_their_own_requests_only() -> None:
    library = Library("xgrammar", lambda: VOCABULARY, encode, CompileLimits(seconds=6.0, megabytes=1024))
    try:
        for at in range(8):
            part = f'("a"{{0,{3000 + at}}} "b"{{0,3000}}){{0,3000}}'
            library.want(100 + at, Grammar("ebnf", f"root ::= {' '.join([part] * 40)}"))  # gigabytes, and seconds until they are full
        library.want(200, grammar_of("regex", "easy"))
        order: list[int] = []
        found: dict[int, Answer] = {}
        while len(order) < 9:
            found |= (new := answers(library, 1))
            order += new
        assert found[200].error == ""
        assert all("compile" in found[100 + at].error or "slow" in found[100 + at].error for at in range(8))
        assert order.index(200) < 8, "the easy one waited for all the others"
    finally:
        library.close()


def test_a_compiler_that_is_gone_is_replaced() -> None:
    library = Library("llguidance", lambda: VOCABULARY, encode)
    try:
        library.want(1, grammar_of("regex", "a"))
        assert answers(library, 1)[1].error == ""
        process = library._line._process
        assert process is not None
        process.kill()
        process.wait(timeout=10)
        library.want(2, grammar_of("regex", "b"))
        first = answers(library, 1)[2]
        if first.error:  # it was still thought alive
            assert first.status == 500
            library.want(3, grammar_of("regex", "b"))
            assert answers(library, 1)[3].error == ""
    finally:
        library.close()


def test_a_compiler_that_dies_while_it_is_asked_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library("llguidance", lambda: VOCABULARY, encode)
    real = select.select
    dies: list[bool] = []

    def both(fds: list[int], *rest: Any) -> tuple[list[int], list[int], list[int]]:
        """A question, and the end of the compiler's output, seen together."""
        ready = real(fds, *rest)
        if len(fds) > 1 and dies:
            dies.clear()
            process = library._line._process
            assert process is not None
            process.kill()
            process.wait(timeout=10)
            return fds, [], []
        return ready

    monkeypatch.setattr("radixpd.grammar.library.select.select", both)
    try:
        library.want(1, grammar_of("regex", "a"))
        assert answers(library, 1)[1].error == ""
        dies.append(True)
        library.want(2, grammar_of("regex", "b"))
        assert answers(library, 1)[2].status == 500
        library.want(3, grammar_of("regex", "c"))
        assert answers(library, 1)[3].error == ""
    finally:
        library.close()
