"""Schemas as grammars: what they accept, what random writers make of them, what is refused, and that both backends agree."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from bytes_vocabulary import EOS, Text, allowed, backend, encode, write
from schema_pairs import BASES, PAIRS

from radixpd.grammar.base import Compiled
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.jump import Guide
from radixpd.grammar.keywords import SUPPORTED
from radixpd.grammar.requests import grammar_of

BACKENDS = ("xgrammar", "llguidance")


def compiled(name: str, schema: Any) -> Compiled:
    return backend(name).compile(grammar_of("json_schema", schema))


def accepts(grammar: Compiled, document: Any) -> bool:
    """Whether the document is a whole text of the grammar."""
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in [*encode(json.dumps(document, ensure_ascii=False)), EOS])


def check(schema: Any, texts: list[Text]) -> None:
    """All whole texts are documents of the schema, and there are some."""
    ended = [text for text in texts if text.ended]
    assert ended, f"no document of {schema}"
    for text in ended:
        jsonschema.validate(json.loads(text.data), schema, cls=jsonschema.Draft202012Validator)


def test_there_are_two_hundred_pairs_over_all_keywords() -> None:
    assert len(PAIRS) >= 200
    text = json.dumps(PAIRS)
    # additionalItems is of an older draft, and uniqueItems may only be false.
    assert [key for key in SUPPORTED if f'"{key}"' not in text and key not in ("additionalItems", "uniqueItems")] == []
    for schema, good, bad in PAIRS:
        jsonschema.validate(good, schema, cls=jsonschema.Draft202012Validator)
        if "format" not in json.dumps(schema):
            assert not jsonschema.Draft202012Validator(schema).is_valid(bad), schema


@pytest.mark.parametrize("name", BACKENDS)
def test_a_grammar_accepts_its_documents_and_no_others(name: str) -> None:
    for schema, good, bad in PAIRS:
        grammar = compiled(name, schema)
        assert accepts(grammar, good), (schema, good)
        assert not accepts(grammar, bad), (schema, bad)


def test_random_texts_of_a_schema_are_documents_of_it() -> None:
    for schema, _, _ in BASES:
        grammar = compiled("xgrammar", schema)
        check(schema, [write(grammar, seed) for seed in range(3)])


@pytest.mark.full
@pytest.mark.parametrize("name", BACKENDS)
def test_five_random_texts_of_every_schema(name: str) -> None:
    for schema, _, _ in PAIRS:
        grammar = compiled(name, schema)
        check(schema, [write(grammar, seed) for seed in range(5)])


# llguidance reads a grammar through a lexer that takes the longest piece: where alternatives begin alike, it allows less.
LEXED = [
    {"type": "string", "format": "ipv4"},
    {"type": "object", "properties": {"ab": {"enum": [1]}}, "additionalProperties": {"type": "boolean"}},
]


def test_both_backends_allow_the_same_at_every_step() -> None:
    for schema, good, _ in BASES:
        guides = [Guide(compiled(name, schema).matcher(), encode) for name in BACKENDS]
        for token in [*encode(json.dumps(good, ensure_ascii=False)), EOS]:
            one, other = (set(allowed(guide)) for guide in guides)
            assert one == other or (schema in LEXED and other < one), schema
            for guide in guides:
                guide.accept(token)


def test_jumping_writes_the_same_in_fewer_steps() -> None:
    schema = {"type": "object", "properties": {"first_name": {"enum": [1, 2]}, "last_name": {"enum": [3, 4]}}, "required": ["last_name"]}
    grammar = compiled("xgrammar", schema)
    for seed in range(5):
        slow = write(grammar, seed)
        fast = write(grammar, seed, jump=True)
        assert slow.ended
        assert fast.ended
        assert fast.steps * 2 < slow.steps


def test_a_guide_can_be_rebuilt_anywhere_and_forked() -> None:
    grammar = compiled("xgrammar", {"type": "object", "properties": {"name": {"enum": ["ab", "ac"]}}, "required": ["name"]})
    guide, tokens = Guide(grammar.matcher(), encode), encode('{"name": "ab"}')
    for at, token in enumerate(tokens):
        again = Guide(grammar.matcher(), encode)
        again.replay(tokens[:at])
        assert allowed(again) == allowed(guide)
        guide.accept(token)
    fork = grammar.matcher()
    assert fork.accept(tokens[0])
    other = fork.fork()
    assert fork.accept(tokens[1])
    assert other.accept(tokens[1])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "'not' at /"),
        ({"properties": {"a": {"contains": {}}}}, "'contains' at /properties/a"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "string", "format": "regex"}, "'regex'"),
        ({"type": "string", "pattern": "(a)\\1"}, "back-reference"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern together with maxLength"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
        ({"oneOf": [{"const": "a"}, {"type": "string"}]}, "may overlap"),
        ({"allOf": [{"additionalProperties": False}, {"properties": {"a": {}}}]}, "additionalProperties in one part"),
        ({"$ref": "#/$defs/nobody"}, "there is no"),
        ({"$ref": "http://example.com/x"}, "into the same schema"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b", "minLength": 1}, "b": {"$ref": "#/$defs/a", "maxLength": 1}}},
            "circles",
        ),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer lies between"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "forbids"),
        ({"type": "banana"}, "type at /"),
        (False, "false allows nothing"),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}, "minProperties above 1"),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_of("json_schema", json.dumps(schema))
    assert named in str(caught.value)
