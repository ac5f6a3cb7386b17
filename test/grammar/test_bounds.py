"""What a grammar forces is looked for only where that comes to an end soon: the model's own process does it, for everybody."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar
from bytes_vocabulary import VOCABULARY

from radixpd.core.request import Grammar
from radixpd.grammar.base import Backend, open_backend
from radixpd.grammar.bounds import forces_little
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.requests import grammar_of
from radixpd.grammar.thinking import behind_thought

DOUBLING = "".join(f"a{at} ::= a{at + 1} a{at + 1}\n" for at in range(20)) + 'a20 ::= "x"'
NODE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "v": {"type": "integer"}},
    "required": ["kids", "v"],
}
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 5000}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("xgrammar", VOCABULARY)


def little(ebnf: str) -> bool:
    return forces_little(json.loads(xgrammar.Grammar.from_ebnf(ebnf).serialize_json()))


@pytest.mark.parametrize(
    "ebnf",
    [
        pytest.param('root ::= [a-y]* | x\nx ::= "z" x', id="endless, behind a choice"),
        pytest.param(f"root ::= [a-z] a0\n{DOUBLING}", id="doubled twenty times"),
        pytest.param('root ::= [a-z] "ab"{1000000}', id="repeated"),
        pytest.param(f'root ::= "a" root "{"z" * 3000}" | "b"', id="long, behind each level"),
        pytest.param(f'root ::= "a" x | "b"\nx ::= "c" root "{"z" * 3000}"', id="the same through another rule"),
    ],
)
def test_what_may_force_without_measure_forces_nothing(backend: Backend, ebnf: str) -> None:
    assert not little(ebnf)
    assert backend.pack(backend.compile(Grammar("ebnf", ebnf)))[:1] == b"-"


@pytest.mark.parametrize("schema", [{"type": "object"}, NODE, LONG, {"type": "string", "minLength": 9000, "maxLength": 9000}])
@pytest.mark.parametrize("thinks", [False, True])
def test_what_schemas_force_is_looked_for(schema: dict[str, Any], thinks: bool) -> None:
    grammar = grammar_of("json_schema", schema)
    assert little((behind_thought(grammar, inside=None) if thinks else grammar).text)


def test_a_grammar_that_forces_too_much_is_served_without_it(backend: Backend) -> None:
    for text, forced in ((f"root ::= [a-z] a0\n{DOUBLING}", ""), ('root ::= [a-z] "xyz"', "xyz")):
        compiled = backend.compile(Grammar("ebnf", text))
        for each in (compiled, backend.unpack(backend.pack(compiled))):
            matcher = each.matcher()
            assert matcher.accept(VOCABULARY.tokens.index(b"q"))
            assert matcher.forced() == matcher.fork().forced() == forced


@pytest.mark.parametrize("ebnf", ['root ::= "a" root', 'root ::= "a" x\nx ::= y "b" | x "c"\ny ::= "d" x'])
def test_a_grammar_that_no_text_fits_is_refused(backend: Backend, ebnf: str) -> None:
    with pytest.raises(GrammarError, match="no text fits"):
        backend.compile(Grammar("ebnf", ebnf))


def test_no_more_is_forced_than_was_counted() -> None:
    """Random grammars without circles: the longest text that can be forced anywhere is at most what the count allows."""
    chance = random.Random(7)
    for _ in range(50):
        size = chance.choice((9, 14, 19))
        wide = chance.randrange(2, 5)
        lines = [f"a{at} ::= {' '.join([f'a{at + 1}'] * chance.randrange(1, wide))}" for at in range(size)]
        text = f'root ::= [a-z] a0\n{chr(10).join(lines)}\na{size} ::= "x"'
        length = 1
        for line in lines:
            length *= line.count(" a")
        assert little(text) is (length + 1 <= 2**18)
