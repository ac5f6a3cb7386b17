"""The keywords of JSON schemas that are kept to, and how their values are read. Raises `GrammarError` with the keyword and where it stands.

Invariant: what a function here returns has the type that it says; nobody else looks at a keyword's type. Called by `schema` and its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from radixpd.grammar.errors import GrammarError
from radixpd.grammar.numbers import LONGEST
from radixpd.grammar.pattern import MAX_REPEAT

__all__ = ["SUPPORTED", "TYPES", "as_list", "as_mapping", "bounds", "fixed", "is_kind", "limit", "same", "spelled", "types_of"]

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties")
    ),
}
SUPPORTED = frozenset(("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions")).union(*OF_TYPE.values())


def types_of(schema: Mapping[str, Any], path: str) -> list[str]:
    given = schema.get("type")
    if given is None:
        found = [kind for kind, keys in OF_TYPE.items() if keys & schema.keys()]
        return found or list(TYPES)
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not kinds or any(kind not in TYPES for kind in kinds):
        raise GrammarError(f"type at {path or '/'} must be one of {', '.join(TYPES)}, or a list of them")
    if "number" in kinds and "integer" in kinds:
        kinds = [kind for kind in kinds if kind != "integer"]
    return list(dict.fromkeys(kinds))


def fixed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def bounds(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    found: list[int | None] = []
    for key in (low, high):
        value = schema.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_REPEAT):
            raise GrammarError(f"{key} at {path or '/'} must be between 0 and {MAX_REPEAT}")
        found.append(value)
    least, most = found[0] or 0, found[1]
    if most is not None and least > most:
        raise GrammarError(f"{low} at {path or '/'} is more than {high}")
    return least, most


def limit(
    schema: Mapping[str, Any], closed: str, exclusive: str, path: str, pick: Callable[[Decimal, Decimal], Decimal]
) -> tuple[Decimal | None, bool]:
    """The narrower of two bounds on one side, and whether it is itself left out."""
    found: list[Decimal | None] = []
    for key in (closed, exclusive):
        value = schema.get(key)
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise GrammarError(f"{key} at {path or '/'} must be a number")
        if value is not None and abs(value) >= 10**LONGEST:
            raise GrammarError(f"{key} at {path or '/'} may have {LONGEST} digits")
        found.append(None if value is None else Decimal(str(value)))
    inner, outer = found
    if outer is None or inner is None:
        return (inner, False) if outer is None else (outer, True)
    return (inner, False) if inner != outer and pick(inner, outer) == inner else (outer, True)


def as_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise GrammarError(f"{path} must be a list")
    return value


def as_mapping(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise GrammarError(f"{path} must be an object")
    return value


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def same(one: Any, other: Any) -> bool:
    return spelled(one) == spelled(other)


def is_kind(kind: str, value: Any) -> bool:
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return kind == "string"
        case list():
            return kind == "array"
    return kind == "object"
