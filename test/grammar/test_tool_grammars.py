"""Tool calls and thoughts as grammars: what is written under them is read back by the parser of the same format."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from bytes_vocabulary import EOS, backend, encode, write

from radixpd.core.request import Grammar
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.requests import grammar_of
from radixpd.grammar.thinking import BEGIN, END, behind_thought
from radixpd.grammar.tool_calls import Function, calls, calls_or, marked_calls
from radixpd.text import reasoning
from radixpd.text.reading import Reading
from radixpd.text.tool_calls.formats import FORMATS, JSON_LIST, Format, Wire

BACKENDS = ("xgrammar", "llguidance")
ALL = {**{name: FORMATS[name] for name in ("llama3", "qwen25", "mistral", "deepseekv3", "deepseekv31")}, "list": JSON_LIST}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
LINKED = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["next"],
    "$defs": {"node": {"enum": [1, 2]}},
}
SCHEMAS = {"weather": CITY, "link": LINKED, "stop": {"type": "object", "properties": {}}}
FUNCTIONS = [Function(name, schema, False) for name, schema in SCHEMAS.items()]


def read(format: Format, text: str) -> Reading:
    reading = Reading(reader=format.reader(SCHEMAS))
    reading.feed(text, last=True)
    return reading


def accepts(name: str, grammar: Grammar, text: str) -> bool:
    """Whether this is a whole text of the grammar."""
    matcher = backend(name).compile(grammar).matcher()
    return all(matcher.accept(token) for token in [*encode(text), EOS])


def wire(name: str) -> Wire:
    found = ALL[name].wire
    assert found is not None
    return found


def written(name: str, *made: tuple[str, Any]) -> str:
    way = wire(name)
    one = [f"{way.before}{function}{way.middle}{json.dumps(given)}{way.after}" for function, given in made]
    return way.opening + way.between.join(one) + way.closing


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("many", [False, True])
def test_what_must_be_a_call_is_one(name: str, many: bool, backend_name: str) -> None:
    grammar = backend(backend_name).compile(calls(FUNCTIONS, wire(name), many=many))
    texts = [write(grammar, seed) for seed in range(12)]
    ended = [text for text in texts if text.ended]
    assert ended
    for text in ended:
        reading = read(ALL[name], text.data.decode())
        assert reading.called
        assert reading.content == ""
        assert many or len(reading.calls) == 1
        for call in reading.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", ALL)
def test_several_calls_only_where_they_may_be(name: str, backend_name: str) -> None:
    text = written(name, ("stop", {}), ("link", {"next": 2}))
    assert accepts(backend_name, calls(FUNCTIONS, wire(name), many=True), text)
    assert not accepts(backend_name, calls(FUNCTIONS, wire(name), many=False), text)
    assert not accepts(backend_name, calls(FUNCTIONS, wire(name), many=True), text.replace("2", "3"))


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", [name for name in ALL if name != "list"])
def test_where_text_is_free_calls_are_kept_to_their_schemas(name: str, backend_name: str) -> None:
    grammar = marked_calls(FUNCTIONS, wire(name))
    for text in ("", "no call", written(name, ("stop", {})), "Well. " + written(name, ("link", {"next": 2})) + " Done."):
        assert accepts(backend_name, grammar, text), text
    for text in (written(name, ("link", {"next": 3})), written(name, ("nope", {}))):
        assert not accepts(backend_name, grammar, text), text


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("name", ALL)
def test_a_document_or_a_call(name: str, backend_name: str) -> None:
    document = grammar_of("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    grammar = calls_or(FUNCTIONS, wire(name), document, many=True)
    # A lexer that takes the longest piece cannot leave a call that begins like a document.
    assert accepts(backend_name, grammar, '{"a": "x"}') or (name, backend_name) == ("llama3", "llguidance")
    assert accepts(backend_name, grammar, written(name, ("weather", {"city": "Rome", "unit": "C"})))
    assert not accepts(backend_name, grammar, "free")


def test_only_a_strict_function_needs_a_schema_that_can_be_kept_to() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    with pytest.raises(GrammarError, match=r"parameters of f: .*'uniqueItems' at /properties/a"):
        calls([Function("f", odd, True)], wire("list"), many=False)
    grammar = calls([Function("f", odd, False)], wire("list"), many=False)
    assert accepts("xgrammar", grammar, '[{"name": "f", "arguments": {"b": [1, 1]}}]')


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_function_without_parameters_gets_none(backend_name: str) -> None:
    grammar = calls([Function("f", None, True)], wire("list"), many=False)
    assert accepts(backend_name, grammar, '[{"name": "f", "arguments": {}}]')
    assert not accepts(backend_name, grammar, '[{"name": "f", "arguments": {"a": 1}}]')


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize(
    ("inside", "good", "bad"),
    [
        (
            True,
            ["</think>4", "so <b></b> </thin </</think>\n\n44", "é 日\n</think>\n4"],
            ["4", "</think>x", "a</think>\n\n\n4", "a</think>"],
        ),
        (None, ["4", "<think>x</think>4", "<think>\n4</think>\n\n44"], ["<think>4", "x</think>4", " 4", "<think></think></think>4"]),
        (False, ["4"], ["</think>4"]),
    ],
)
def test_a_grammar_begins_behind_the_thought(backend_name: str, inside: bool | None, good: list[str], bad: list[str]) -> None:
    document = grammar_of("ebnf", 'root ::= number | number root # root\nnumber ::= "4"')
    grammar = behind_thought(document, inside=inside)
    for text in good:
        assert accepts(backend_name, grammar, text), text
    for text in bad:
        assert not accepts(backend_name, grammar, text), text


def test_the_marks_are_those_of_the_parser() -> None:
    assert (BEGIN, END) == (reasoning.BEGIN, reasoning.END)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_thought_may_be_long(name: str) -> None:
    grammar = behind_thought(grammar_of("json_schema", CITY), inside=True)
    assert accepts(name, grammar, "thinking < about\n" * 2000 + '</think>\n\n{"city": "Rome", "unit": "C"}')
