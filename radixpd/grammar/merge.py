"""Schemas that must all hold (`allOf`, keywords beside `$ref`) as one schema. Pure. Called by `schema`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from radixpd.grammar.errors import GrammarError

__all__ = ["ANNOTATIONS", "flat"]

# Keywords that say something to people, or to other programs, but nothing about which documents are valid.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment", "id")
)
NAMING = frozenset(("$defs", "definitions"))
STEPS = 32
SCOPES = (
    ({"additionalProperties"}, {"properties", "patternProperties", "required"}),
    ({"items", "additionalItems"}, {"prefixItems", "items", "additionalItems"}),
)


def flat(schema: dict[str, Any], path: str, target: Callable[[str, str], Any], steps: int = 0) -> dict[str, Any]:
    """`schema` without `allOf`, and with `$ref`, `anyOf` and `oneOf` only where nothing stands beside them."""
    if steps > STEPS:
        raise GrammarError(f"allOf or $ref at {path or '/'} goes round in circles, or too deep")
    said = {key: value for key, value in schema.items() if key not in ANNOTATIONS and key not in NAMING}
    parts: list[Any] = []
    if "allOf" in said:
        parts += _options(said.pop("allOf"), path)
    if "$ref" in said and (parts or len(said) > 1):
        ref = said.pop("$ref")
        parts.append(target(ref, path) if isinstance(ref, str) else ref)
    for part in parts:
        if part is True:
            continue
        if not isinstance(part, dict):
            raise GrammarError(f"allOf at {path or '/'} must hold objects")
        said = _both(said, flat(part, path, target, steps + 1), path)
        if "$ref" in said and len(said) > 1:
            said = flat(said, path, target, steps + 1)
    for key in ("anyOf", "oneOf"):
        if key in said and len(said) > 1:
            others = {other: value for other, value in said.items() if other != key}
            said = {key: [{"allOf": [others, option]} for option in _options(said[key], path)]}
    return said


def _options(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"allOf, anyOf and oneOf at {path or '/'} must be lists with something in them")
    return value


def _both(one: Mapping[str, Any], other: Mapping[str, Any], path: str) -> dict[str, Any]:
    _check_scope(one, other, path)
    merged = dict(one)
    for key, value in other.items():
        merged[key] = value if key not in merged or merged[key] == value else _joined(key, merged[key], value, path)
    return merged


def _check_scope(one: Mapping[str, Any], other: Mapping[str, Any], path: str) -> None:
    """Keywords that speak of "all the others" mean those of their own part."""
    for rest, named in SCOPES:
        for here, there in ((one, other), (other, one)):
            spoken = here.keys() & rest and any(here[key] is not True for key in here.keys() & rest)
            if spoken and any(here.get(key) != there[key] for key in there.keys() & named):
                raise GrammarError(f"{min(here.keys() & rest)} in one part of allOf at {path or '/'}, beside another, is not supported")


def _joined(key: str, one: Any, other: Any, path: str) -> Any:
    """One value of a keyword that both say something with."""
    match key:
        case "properties" if isinstance(one, dict) and isinstance(other, dict):
            return {**one, **{name: value if name not in one else {"allOf": [one[name], value]} for name, value in other.items()}}
        case "required" if isinstance(one, list) and isinstance(other, list):
            return [*one, *(name for name in other if name not in one)]
        case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
            return max(one, other)
        case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
            return min(one, other)
        case "enum" if isinstance(one, list) and isinstance(other, list):
            return [value for value in one if value in other]
        case "type":
            kinds = [kind for kind in ([one] if isinstance(one, str) else one) if kind in ([other] if isinstance(other, str) else other)]
            if not kinds:
                raise GrammarError(f"allOf at {path or '/'} leaves no type")
            return kinds
    raise GrammarError(f"{key} in more than one part of allOf at {path or '/'} is not supported")
