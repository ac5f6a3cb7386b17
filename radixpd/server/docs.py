"""What a route says about itself: one `Doc` per handler, in the module's `DOCS` beside its `ROUTES`.

Types are the ones the server uses: a body is the struct that the handler reads, an answer is a type of `answers` or `state_answers`. What a
struct's types leave open (a field that the handler reads by hand) is given as a schema. Invariant: a `Doc` knows nothing of one server;
what depends on the model or on flags (`TokenId`, the largest `n`) is filled in by `openapi`, which assembles the document. Used by all
route modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["JSON_TYPE", "REFERENCE", "TOKEN_IDS", "Body", "Doc", "Schema", "exactly_one", "one_or_many", "or_null", "ref"]

JSON_TYPE = "application/json"
REFERENCE = "#/components/schemas/{name}"

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """A reference to a named schema of the document: TokenId, Sampling, Unserved, or a type of an answer."""
    return {"$ref": REFERENCE.format(name=name)}


def one_or_many(schema: Schema, most: int, *, least: int = 1) -> Schema:
    """A value, or a list of `least` to `most` of them."""
    return {"anyOf": [schema, {"type": "array", "items": schema, "minItems": least, "maxItems": most}]}


def or_null(schema: Schema) -> Schema:
    """The same, or null for the default."""
    return {"anyOf": [*(schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]), {"type": "null"}]}


def exactly_one(*names: str) -> Schema:
    """The rule that one of these fields must be given, and no other of them."""
    return {"oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]}


TOKEN_IDS: Schema = {"type": "array", "items": ref("TokenId"), "minItems": 1}


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON body. Ranges of native names are known; everything else that the handler enforces stands here.

    `fields`: schemas that replace the struct's own; `ranges`: closed ranges of numbers; `wishes`: fields of `Sampling` and `Options` that
    the route reads, client's name -> native name; `harmless`: fields accepted without effect; `refused`: fields that must ask for nothing,
    each with what does (`LATER`); `rule`: what must hold besides; `lists`: how long a list may be that holds one value for each prompt;
    `required`: whether there must be a body.
    """

    kind: type[msgspec.Struct]
    fields: Mapping[str, Schema] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    wishes: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rule: Schema = field(default_factory=dict)
    lists: tuple[int, int] | None = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class Doc:
    """One operation. Errors that every route can have (400, 500, those of keys, deadlines and a body) need not be named.

    `answer`: the type of the answer, or None for text; `media`: its content types; `parameters`: schemas of query parameters, and of those
    parts of the path that are not any text; `headers`: schemas of headers that the route reads; `events`: the type of one event where
    `stream` is true; `others`: statuses whose body is not the error shape, with the type of it; `errors`: statuses that are.
    """

    summary: str
    answer: Any = None
    media: tuple[str, ...] = (JSON_TYPE,)
    body: Body | None = None
    parameters: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)
    events: Any = None
    others: Mapping[int, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
