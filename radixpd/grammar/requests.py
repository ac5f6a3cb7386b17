"""From what a client wrote to the `Grammar` that the model runner compiles. Pure: the door calls it, without any backend.

`json_schema` and `regex` become EBNF here, so that what cannot be served is refused at once and by name, and every backend means the same.
Raises `GrammarError`. Called by `runtime.admission`; backends read `tags` with `read_tags`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from radixpd.core.request import Grammar
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.pattern import whole
from radixpd.grammar.schema import schema_ebnf

__all__ = ["ANY_OBJECT", "FIELDS", "MAX_SOURCE", "Tag", "Tags", "grammar_of", "read_tags"]

FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")
MAX_SOURCE = 64 * 1024  # characters of one schema, pattern or grammar
MAX_TAGS = 128
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Tag:
    """Behind `begin`, a text of `ebnf`, then `end`."""

    begin: str
    ebnf: str
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """Free text until one of `triggers`; it must then go on as one of the tags that begin with it."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]


def grammar_of(field: str, value: str | Mapping[str, Any]) -> Grammar:
    """The grammar of one of `FIELDS`. A schema or a tag may be JSON or its text."""
    source = value if isinstance(value, str) else json.dumps(value)
    if not 1 <= len(source) <= MAX_SOURCE:
        raise GrammarError(f"it must have between 1 and {MAX_SOURCE} characters, got {len(source)}")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in source):
        raise GrammarError("it holds half a character (a surrogate)")
    return _grammar(field, source)


@lru_cache(64)
def _grammar(field: str, source: str) -> Grammar:
    match field:
        case "json_schema":
            return Grammar("ebnf", _schema(_json(source)))
        case "regex":
            return Grammar("ebnf", f"root ::= {whole(source)}\n")
        case "ebnf":
            return Grammar("ebnf", source)
    return Grammar("tags", json.dumps(asdict(_tags(_json(source)))))


def read_tags(grammar: Grammar) -> Tags:
    """What `grammar_of` wrote."""
    data = json.loads(grammar.text)
    return Tags(tuple(data["triggers"]), tuple(Tag(**tag) for tag in data["tags"]))


def _schema(schema: Any) -> str:
    try:
        ebnf = schema_ebnf(schema)
        ebnf.encode()
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    except UnicodeEncodeError:
        raise GrammarError("it holds half a character (a surrogate)") from None
    return ebnf


def _json(source: str) -> Any:
    try:
        return json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {str(error) or 'it is nested too deeply'}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _tags(data: Any) -> Tags:
    """Either of the two forms in use: `structures` and `triggers`, or a `format` of type `triggered_tags`."""
    if not isinstance(data, dict):
        raise GrammarError("it must be an object")
    if isinstance(shape := data.get("format"), dict):
        return _triggered(shape)
    structures, triggers = _items(data, "structures"), _texts(data, "triggers")
    tags = [Tag(_text(each, "begin"), _schema(each.get("schema", {})), _text(each, "end")) for each in structures]
    return _checked(triggers, tags)


def _triggered(shape: dict[str, Any]) -> Tags:
    if shape.get("type") != "triggered_tags":
        raise GrammarError("format.type must be triggered_tags")
    known = {"type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"}
    if others := [key for key, value in shape.items() if key not in known or (key not in ("type", "triggers", "tags") and value)]:
        raise GrammarError(f"format.{others[0][:60]} is not supported")
    tags = []
    for each in _items(shape, "tags"):
        content = each.get("content")
        if not isinstance(content, dict):
            raise GrammarError("the content of a tag must be an object")
        tags.append(Tag(_text(each, "begin"), _content(content), _text(each, "end")))
    return _checked(_texts(shape, "triggers"), tags)


def _content(content: dict[str, Any]) -> str:
    match content.get("type"):
        case "json_schema":
            return _schema(content.get("json_schema", {}))
        case "regex" if isinstance(content.get("pattern"), str):
            return f"root ::= {whole(content['pattern'])}\n"
        case "grammar" if isinstance(content.get("grammar"), str):
            return str(content["grammar"])
    raise GrammarError("the content of a tag must have type json_schema, regex (with pattern) or grammar (with grammar)")


def _checked(triggers: list[str], tags: list[Tag]) -> Tags:
    if not 1 <= len(tags) <= MAX_TAGS or not 1 <= len(triggers) <= MAX_TAGS:
        raise GrammarError(f"there must be between 1 and {MAX_TAGS} tags and triggers")
    for tag in tags:
        if sum(tag.begin.startswith(trigger) for trigger in triggers) != 1:
            raise GrammarError(f"exactly one trigger must be the beginning of {tag.begin[:60]!r}")
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise GrammarError(f"no tag begins with the trigger {trigger[:60]!r}")
    return Tags(tuple(triggers), tuple(tags))


def _items(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = data.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise GrammarError(f"{name} must be a list of objects")
    return value


def _texts(data: dict[str, Any], name: str) -> list[str]:
    value = data.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise GrammarError(f"{name} must be a list of texts")
    return value


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or (name == "begin" and not value):
        raise GrammarError(f"{name} of a tag must be a text")
    return value
