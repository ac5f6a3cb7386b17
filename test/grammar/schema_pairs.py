"""Schemas over all supported keywords, each with a document that is of it and one that is not, alone and inside others.

Documents are spelt as our grammars spell them: properties in the schema's order, `", "` and `": "`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BASES", "PAIRS"]

PERSON = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 3}, "a": {"type": "integer"}}, "required": ["n", "a"]}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
}

# (schema, a document of it, a document that is not)
BASES: list[tuple[Any, Any, Any]] = [
    ({"type": "string", "maxLength": 4}, "abcd", "abcde"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "日本", "日"),
    ({"type": "string", "pattern": "^[a-z]{2}-\\d+$"}, "ab-12", "a-1"),
    ({"type": "string", "pattern": "^(x|yy)*$"}, "xyyx", "xy"),
    ({"type": "string", "pattern": "^[^a]\\w?$"}, "b_", "a"),
    ({"type": "string", "pattern": "^\"\\\\\n$"}, '"\\\n', '"'),
    ({"type": "string", "format": "date"}, "2026-02-28", "2026-02-30"),
    ({"type": "string", "format": "time"}, "12:30:00Z", "25:00:00Z"),
    ({"type": "string", "format": "date-time"}, "1999-12-31T23:59:59+01:00", "1999-12-31"),
    ({"type": "string", "format": "uuid"}, "00000000-1111-2222-3333-44444444aaaa", "0000"),
    ({"type": "string", "format": "ipv4"}, "10.0.200.255", "10.0.0.256"),
    ({"type": "string", "format": "email"}, "a.b@c.de", "a.b"),
    ({"type": "string", "format": "hostname"}, "a-b.example", "-a"),
    ({"type": "string", "format": "uri"}, "https://a.example/x", "a.example"),
    ({"type": "integer"}, -120, 1.5),
    ({"type": "integer", "minimum": -5, "maximum": 17}, 17, 18),
    ({"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1000}, 100, 99),
    ({"type": "integer", "minimum": 1, "multipleOf": 1}, 42, 0),
    ({"type": "number"}, -1.25, "1"),
    ({"type": "number", "minimum": 0.5, "maximum": 2.25}, 1.125, 2.5),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 10}, 9.75, 0),
    ({"type": "number", "maximum": -3}, -3.5, -2.5),
    ({"type": "boolean"}, True, None),
    ({"type": "null"}, None, False),
    ({"type": ["string", "null"], "maxLength": 2}, None, "abc"),
    ({"enum": ["é\"x", 3, None, {"k": [1]}]}, {"k": [1]}, 4),
    ({"const": "snow ☃"}, "snow ☃", "snow"),
    ({"type": "string", "enum": ["a", "b"]}, "b", "c"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}, [1, 2, 3], []),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": {"type": "boolean"}, "maxItems": 4},
     [1, None, True], [None]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1}, [1], [1, 2]),
    ({"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}, [0, 1], [0]),
    (PERSON, {"n": "Bo", "a": 7}, {"n": "Bo"}),
    ({"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}, "c": {"enum": [3]}}, "required": ["b"]},
     {"b": 2, "c": 3}, {"a": 1}),
    ({"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}}, {"b": 2}, {"b": 1}),
    ({"type": "object", "properties": {"ab": {"enum": [1]}}, "additionalProperties": {"type": "boolean"}},
     {"ab": 1, "a": True, "abc": False}, {"ab": True}),
    ({"type": "object", "required": ["a"]}, {"a": [None]}, {}),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2}, {"x": 1, "y": 2}, {}),
    ({"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": {"type": "integer"}}, "additionalProperties": False},
     {"x_ab": 3}, {"y": 3}),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"}}, {"ab": None}, {"abc": None}),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, "x", "xy"),
    ({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
                {"type": "object", "properties": {"k": {"const": "b"}, "w": {"type": "null"}}, "required": ["k", "w"]}]},
     {"k": "b", "w": None}, {"k": "b", "v": 1}),
    ({"allOf": [PERSON, {"properties": {"z": {"enum": [0]}}, "required": ["z"]}]}, {"n": "", "a": 1, "z": 0}, {"n": "", "a": 1}),
    ({"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     {"a": 1}, {}),
]  # fmt: skip


def _inside(base: tuple[Any, Any, Any]) -> list[tuple[Any, Any, Any]]:
    schema, good, bad = base
    return [
        base,
        ({"type": "array", "items": schema, "maxItems": 2}, [good, good], [good, bad]),
        ({"type": "object", "properties": {"p": schema, "q": {"enum": [1]}}, "required": ["p"]}, {"p": good, "q": 1}, {"p": bad}),
        ({"$ref": "#/$defs/x", "$defs": {"x": schema}}, good, bad),
        ({"anyOf": [{"type": "array", "items": {"const": "never"}, "minItems": 5, "maxItems": 5}, schema]}, good, bad),
    ]


PAIRS: list[tuple[Any, Any, Any]] = [pair for base in BASES for pair in _inside(base)] + [
    ({"$ref": "#/$defs/t", "$defs": {"t": TREE}}, {"v": 1, "kids": [{"v": 2}, {"kids": []}]}, {"kids": [1]}),
    ({"definitions": {"x": {"type": "null"}}, "type": "array", "items": {"$ref": "#/definitions/x"}, "maxItems": 2}, [None], [0]),
]
